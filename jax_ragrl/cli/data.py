"""Commands that prepare data: `world` and `index`."""

from __future__ import annotations

import argparse
import json

from jax_ragrl.cli.common import AddCommand, print_json
from jax_ragrl.config.schema import local
from jax_ragrl.corpus.data_path import data_path


def add_commands(command: AddCommand) -> None:
    sub = command("world", run_world, "generate the synthetic corpus and its questions")
    sub.add_argument("--size", type=int, default=240, help="number of people in the corpus")
    sub.add_argument("--seed", type=int, default=0, help="random seed of the corpus")
    sub.add_argument(
        "--out", type=local, required=True, help="output folder: passages.jsonl and SPLIT.jsonl"
    )
    _add_index_options(command("index", run_index, "encode a corpus and build its search index"))


def _add_index_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--corpus", type=data_path, required=True, help="file or folder of passages")
    sub.add_argument("--out", type=local, required=True, help="output folder of the index")
    sub.add_argument(
        "--encoder",
        default="lexical",
        help="text encoder: lexical, minilm, a folder, or OWNER/NAME",
    )
    sub.add_argument("--kind", default="scann", help="kind of search: scann or exact")
    sub.add_argument(
        "--dtype",
        default="float32",
        help="dtype of the vectors: float32 or bfloat16 (half the size)",
    )
    sub.add_argument("--questions", type=data_path, help="questions on which recall@k is measured")
    qrels = "relevance judgments of the questions (TREC or BEIR), instead of their gold passages"
    sub.add_argument("--qrels", type=data_path, help=qrels)
    vectors = "precomputed vectors in corpus order (flat Faiss, .npy, .memmap)"
    sub.add_argument("--vectors", type=data_path, help=vectors)
    for text in ("query", "passage"):
        sub.add_argument(
            f"--{text}-prefix", help=f"prefix of each {text} (default: that of the model folder)"
        )


def run_world(options: argparse.Namespace) -> None:
    from jax_ragrl.corpus.formats.flashrag import save_questions
    from jax_ragrl.corpus.passages import Corpus, save_corpus
    from jax_ragrl.corpus.world import generate

    world = generate(options.seed, options.size)
    options.out.mkdir(parents=True, exist_ok=True)
    save_corpus(Corpus(world.passages), options.out / "passages.jsonl")
    for split, questions in world.questions.items():
        save_questions(questions, options.out / f"{split}.jsonl")
    counts = {split: len(questions) for split, questions in world.questions.items()}
    print(json.dumps({"passages": len(world.passages), **counts, "out": str(options.out)}))


def run_index(options: argparse.Namespace) -> None:
    from jax_ragrl.retrieval import index

    result = index.run_index(
        corpus_path=options.corpus,
        out=options.out,
        encoder=options.encoder,
        kind=options.kind,
        questions_path=options.questions,
        vectors_path=options.vectors,
        dtype=options.dtype,
        qrels_path=options.qrels,
        query_prefix=options.query_prefix,
        passage_prefix=options.passage_prefix,
    )
    print_json(result)
