"""Commands that prepare data: `world` and `index`."""

from __future__ import annotations

import argparse
import json

from jax_ragrl.cli.common import AddCommand, add_fields_option, print_json
from jax_ragrl.config.arguments import natural
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
        default="",
        help="text encoder: hashed, minilm, a folder, or OWNER/NAME (default: none, for bm25)",
    )
    kind = "kind of search: bm25, scann, exact or pipeline (default: scann with an encoder)"
    sub.add_argument("--kind", default="", help=kind)
    _add_pipeline_options(sub)
    _add_reading_options(sub)
    sub.add_argument(
        "--dtype",
        default="float32",
        help="dtype of the vectors: float32 or bfloat16 (half the size)",
    )
    recall = "recall of the ten nearest for which scann is tuned, such as 0.98; 0 = not tuned"
    sub.add_argument("--recall", type=float, default=0.0, help=recall)
    questions = "questions on which recall@k, nDCG@10 and MRR@10 are measured"
    sub.add_argument("--questions", type=data_path, help=questions)
    near = "count near duplicates of passages too (4/5 of their runs of five words in common)"
    sub.add_argument("--near-duplicates", action="store_true", help=near)
    qrels = "relevance judgments of the questions (TREC or BEIR), instead of their gold passages"
    sub.add_argument("--qrels", type=data_path, help=qrels)
    vectors = "precomputed vectors in corpus order (flat Faiss, .npy, .memmap)"
    sub.add_argument("--vectors", type=data_path, help=vectors)
    for text in ("query", "passage"):
        sub.add_argument(
            f"--{text}-prefix", help=f"prefix of each {text} (default: that of the model folder)"
        )


def _add_reading_options(sub: argparse.ArgumentParser) -> None:
    add_fields_option(sub)
    chunk = "divide long passages into chunks of SIZE tokens of the encoder (words without one)"
    sub.add_argument("--chunk", default="", metavar="SIZE[,OVERLAP]", help=chunk)


def _add_pipeline_options(sub: argparse.ArgumentParser) -> None:
    language = "language of stop words and stemmer, with bm25 (default: english; none: neither)"
    sub.add_argument("--language", default="", help=language)
    retrievers = "retrievers of a pipeline, with commas, such as bm25,minilm"
    sub.add_argument("--retrievers", default="", help=retrievers)
    sub.add_argument("--fuse", default="", help="fusion of a pipeline: rrf (default) or weighted")
    rerank = "reranker of a pipeline: name or folder of a cross-encoder, or llm"
    sub.add_argument("--rerank", default="", help=rerank)
    candidates = "hits per retriever that a pipeline fuses and reranks (default: 100)"
    sub.add_argument("--candidates", type=natural, default=0, help=candidates)


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
    from jax_ragrl.config.kinds import HASHED_WORDS
    from jax_ragrl.corpus.chunks import parse_chunks
    from jax_ragrl.corpus.formats.own import parse_fields
    from jax_ragrl.corpus.reading import Reading
    from jax_ragrl.retrieval import index
    from jax_ragrl.run.index_folder import build_folder, section_of

    section = section_of(vars(options))
    chunks = parse_chunks(options.chunk) if options.chunk else None
    reading = Reading(parse_fields(options.fields), chunks)
    common = {"near_duplicates": options.near_duplicates, "reading": reading}
    if section is not None:
        paths = (options.corpus, options.questions, options.qrels)
        print_json(build_folder(section, *paths, **common))
        return
    result = index.run_index(
        corpus_path=options.corpus,
        out=options.out,
        encoder=options.encoder or HASHED_WORDS,
        kind=options.kind or "scann",
        questions_path=options.questions,
        vectors_path=options.vectors,
        dtype=options.dtype,
        qrels_path=options.qrels,
        **common,
        recall=options.recall,
        query_prefix=options.query_prefix,
        passage_prefix=options.passage_prefix,
    )
    print_json(result)
