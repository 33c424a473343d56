"""Commands that prepare data: `data world`, `split`, `poison` and `index`, and `replies`."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from jax_ragrl.cli.common import AddCommand, add_fields_option, parse_numbers, print_json, text_file
from jax_ragrl.config.arguments import natural
from jax_ragrl.config.schema import build, local
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.errors import UserError

if TYPE_CHECKING:
    from jax_ragrl.corpus.reading import Reading


def add_data(command: AddCommand) -> None:
    sub = command("data world", run_world, "generate the synthetic corpus and its questions")
    sub.add_argument("--size", type=int, default=240, help="number of people in the corpus")
    sub.add_argument("--seed", type=int, default=0, help="random seed of the corpus")
    famous = "fraction of facts that the reader of the corpus knows without documents"
    sub.add_argument("--famous", type=float, default=0.3, help=famous)
    hops = "comma-separated numbers of hops of the questions"
    sub.add_argument("--hops", default="1,2,3,4", help=hops)
    relations = "comma-separated relations whose passages are out of date, such as mayor,spouse"
    sub.add_argument("--outdated", default="", help=relations)
    sub.add_argument(
        "--out", type=local, required=True, help="output folder: passages.jsonl and SPLIT.jsonl"
    )
    sub = command("data split", run_split, "divide a file of questions into train, dev and test")
    sub.add_argument("questions", type=data_path, help="file of questions")
    shares = "shares of train, dev and test, such as 0.7,0.1,0.2; a share of 0 writes no file"
    sub.add_argument("--shares", required=True, metavar="TRAIN,DEV,TEST", help=shares)
    add_fields_option(sub)
    sub.add_argument("--out", type=local, required=True, help="output folder: SPLIT.jsonl")
    summary = "write passages that mislead a reader, to be added to a corpus"
    sub = command("data poison", run_poison, summary)
    sub.add_argument("--corpus", type=data_path, required=True, help="file or folder of passages")
    gold = "questions with gold passages of the corpus, by id"
    sub.add_argument("--questions", type=data_path, required=True, help=gold)
    share = "share of the facts that get a misleading passage"
    sub.add_argument("--share", type=float, default=1.0, help=share)
    instruct = "tell the reader what to answer, in place of stating something false"
    sub.add_argument("--instruct", action="store_true", help=instruct)
    add_fields_option(sub)
    out = "file of the new passages alone: index it with --corpus CORPUS,FILE"
    sub.add_argument("--out", type=text_file, required=True, metavar="FILE", help=out)
    _add_index(command)


def add_replies(command: AddCommand) -> None:
    summary = "add the replies that runs stored to a file, which repeats the runs without a server"
    sub = command("replies", run_replies, summary)
    caches = "files of stored replies (llm_cache.sqlite in the folders of runs and tables)"
    sub.add_argument("caches", type=local, nargs="+", metavar="CACHE", help=caches)
    out = "the file, for llm.replies; it keeps what it holds, and .xz at its end compresses it"
    sub.add_argument("--out", type=local, required=True, metavar="FILE", help=out)


def _add_index(command: AddCommand) -> None:
    sub = command("data index", run_index, "encode a corpus and build its search index")
    corpus = "file or folder of passages; or several: a folder or pattern of shards, or a,b"
    sub.add_argument("--corpus", type=data_path, help=corpus)
    sub.add_argument("--out", type=local, required=True, help="output folder of the index")
    add = "file of passages that are added to the index in --out, which keeps its settings"
    sub.add_argument("--add", type=data_path, metavar="FILE", help=add)
    remove = "file of passage ids, one per line, that are removed from the index in --out"
    sub.add_argument("--remove", type=local, metavar="IDS_FILE", help=remove)
    sub.add_argument(
        "--encoder",
        default="",
        help="text encoder: hashed, minilm, a folder, or OWNER/NAME (default: none for bm25, "
        "hashed for other kinds)",
    )
    kind = "kind of search: bm25, scann, exact or pipeline (default: scann with an encoder)"
    sub.add_argument("--kind", default="", help=kind)
    language = "language of stop words and stemmer, with bm25 (default: english; none: neither)"
    sub.add_argument("--language", default="", help=language)
    retrievers = "retrievers of a pipeline, with commas, such as bm25,minilm"
    sub.add_argument("--retrievers", default="", help=retrievers)
    sub.add_argument("--fuse", default="", help="fusion of a pipeline: rrf (default) or weighted")
    rerank = "reranker of a pipeline: name or folder of a cross-encoder, or llm"
    sub.add_argument("--rerank", default="", help=rerank)
    candidates = "hits per retriever that a pipeline fuses and reranks; 0 = 100"
    sub.add_argument("--candidates", type=natural, default=0, help=candidates)
    add_fields_option(sub)
    chunk = "divide long passages into chunks of SIZE tokens of the encoder (words without one)"
    sub.add_argument("--chunk", default="", metavar="SIZE[,OVERLAP]", help=chunk)
    _add_vector_options(sub)
    questions = (
        "questions on which recall@k, nDCG@10 and MRR@10 are measured; without gold passages, the "
        "share with an answer in the first k passages"
    )
    sub.add_argument("--questions", type=data_path, help=questions)
    qrels = "relevance judgments of the questions (TREC or BEIR), instead of their gold passages"
    sub.add_argument("--qrels", type=data_path, help=qrels)


def _add_vector_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--dtype",
        default="",
        help="dtype of the vectors: float32 (default), bfloat16 (half the size), or int8 for the "
        "kind exact",
    )
    recall = "recall of the ten nearest for which scann is tuned, such as 0.98; 0 = not tuned"
    sub.add_argument("--recall", type=float, default=0.0, help=recall)
    vectors = "precomputed vectors in corpus order (flat Faiss, .npy, .memmap)"
    sub.add_argument("--vectors", type=data_path, help=vectors)
    for text in ("query", "passage"):
        sub.add_argument(
            f"--{text}-prefix", help=f"prefix of each {text} (default: that of the model folder)"
        )


def run_world(options: argparse.Namespace) -> None:
    from jax_ragrl.run.config import WorldData
    from jax_ragrl.run.world_folder import save_world

    values = {
        "seed": options.seed,
        "size": options.size,
        "famous_fraction": options.famous,
        "hops": parse_numbers(options.hops),
        # The default, an empty text, means no relation, not a relation with an empty name.
        "outdated_relations": list(filter(None, options.outdated.split(","))),
    }
    print(json.dumps(save_world(build(WorldData, values, "data.world"), options.out)))


def run_split(options: argparse.Namespace) -> None:
    from jax_ragrl.corpus.fields import parse_fields
    from jax_ragrl.corpus.formats import load_questions, save_questions
    from jax_ragrl.corpus.questions import split_questions
    from jax_ragrl.runtime.caches import new_files

    questions = load_questions(options.questions, fields=parse_fields(options.fields))
    parts = split_questions(questions, parse_numbers(options.shares, float))
    with new_files(options.out) as draft:
        for split in filter(parts.get, parts):
            save_questions(parts[split], draft / f"{split}.jsonl")
    counts = {split: len(part) for split, part in parts.items()}
    print(json.dumps(counts | {"out": str(options.out)}))


def run_poison(options: argparse.Namespace) -> None:
    from jax_ragrl.corpus.fields import parse_fields
    from jax_ragrl.corpus.formats import iter_passages, load_questions
    from jax_ragrl.corpus.passages import Corpus, save_corpus
    from jax_ragrl.corpus.poison import misleading_passages

    # It may be the corpus itself.
    if options.out.exists():
        raise UserError(f"{options.out} exists: give another file with --out, or remove it")
    fields = parse_fields(options.fields)
    questions = load_questions(options.questions, fields=fields)
    passages = iter_passages(options.corpus, fields)
    added = misleading_passages(questions, passages, options.share, instruct=options.instruct)
    save_corpus(Corpus(added), options.out)
    print(json.dumps({"questions": len(questions), "passages": len(added)}))


def run_replies(options: argparse.Namespace) -> None:
    from jax_ragrl.llm.recorded import record_replies

    if options.out.suffix != ".xz":
        text_file(options.out)
    print(record_replies(options.caches, options.out))


def run_index(options: argparse.Namespace) -> None:
    from jax_ragrl.runtime.multihost import is_process_zero, join, on_process_zero

    join()  # jax.distributed must start before JAX looks for devices
    from jax_ragrl.run.index_folder import build_folder, section_of
    from jax_ragrl.run.lock import lock_folder
    from jax_ragrl.runtime.compile_cache import enable_compile_cache

    enable_compile_cache(options.out)
    on_process_zero(lambda: lock_folder(options.out, "--out"))
    if options.add or options.remove:
        from jax_ragrl.run.update_index import check_options, update_index

        check_options(vars(options))
        result = update_index(options.out, options.add, options.remove)
    elif not options.corpus:
        raise UserError("there is nothing to index: give --corpus, or --add and --remove")
    else:
        prefixes = {name: getattr(options, name) for name in ("query_prefix", "passage_prefix")}
        result = build_folder(
            section_of(vars(options)),
            *(options.corpus, options.questions, options.qrels),
            vectors_path=options.vectors,
            reading=_reading(options),
            **prefixes,
        )
    if is_process_zero():
        print_json(result)


def _reading(options: argparse.Namespace) -> Reading:
    """How the corpus is read: the names of its fields, and chunks."""
    from jax_ragrl.corpus.chunks import parse_chunks
    from jax_ragrl.corpus.fields import parse_fields
    from jax_ragrl.corpus.reading import Reading

    chunks = parse_chunks(options.chunk) if options.chunk else None
    return Reading(parse_fields(options.fields), chunks)
