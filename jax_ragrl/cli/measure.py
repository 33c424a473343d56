"""The commands of `bench`, which measure speed and memory."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax_ragrl.cli.common import (
    DEFAULT_CONFIG,
    MODEL_FORMS,
    AddCommand,
    add_fields_option,
    parse_numbers,
)
from jax_ragrl.config.arguments import amount, natural, positive
from jax_ragrl.config.functions import own_prints
from jax_ragrl.config.schema import local
from jax_ragrl.errors import UserError
from jax_ragrl.run.overrides import load_config

Numbers = Sequence[tuple[str, int, str]]  # name, default and help of options
MODEL = "published model whose architecture is used, or smollm2, or tiny"


def add_bench(command: AddCommand) -> None:
    """One command per measurement, whose function computes the JSON to print."""

    def add(name: str, measure: Any, summary: str, **takes: bool) -> argparse.ArgumentParser:
        run = functools.partial(_print_result, measure)
        kind = command(f"bench {name}", run, f"measure {summary}", **takes)
        kind.add_argument("--json", action="store_true", help="print the result on one line")
        return kind

    _add_train_options(add("train", measure_train, "a training step"))
    _add_sample_options(add("sample", measure_sample, "sampling from prompts"))
    summary = "how well and how fast retrievers find the gold passages of question sets"
    _add_retrieval_options(add("retrieval", measure_retrieval, summary))
    summary = "credit rules against executed replay, on the policy of --config=FILE"
    _add_credit_options(add("credit", measure_credit, summary, takes_config=True))
    summary = "a whole step of --config=FILE: rollout and updates"
    step = add("step", measure_step, summary, takes_config=True)
    step.add_argument("--workdir", type=local, help="folder with an index (default: a new folder)")
    repeats = "number of timed steps, after one that compiles"
    step.add_argument("--repeats", type=positive, default=2, help=repeats)
    step.add_argument("--shape", help=f"{MODEL}; its weights are random (default: the policies)")


def _add_credit_options(kind: argparse.ArgumentParser) -> None:
    rules = "comma-separated: names of config.credit, or module:function (default: all names)"
    kind.add_argument("--rules", default="", help=rules)
    questions = "training questions, each of which has one decision"
    kind.add_argument("--questions", type=positive, default=48, help=questions)
    error = "largest standard error of the replayed difference between two actions, in rewards"
    kind.add_argument("--error", type=amount, default=0.05, help=error)
    repeats = "repetitions of the rollouts of a rule after each action"
    kind.add_argument("--repeats", type=positive, default=4, help=repeats)
    kind.add_argument("--group", type=positive, default=4, help="rollouts in a group of chains")
    kind.add_argument("--widths", default="2,4", help="actions per decision of the trees")
    folder = "folder of finished decisions (resumable), table.json and page.html"
    default = pathlib.Path("runs/credit")
    kind.add_argument("--folder", type=local, default=default, help=folder)


def _add_retrieval_options(kind: argparse.ArgumentParser) -> None:
    data = (
        "question sets that name gold passages, each with its corpus; or folders that hold a set "
        "per subfolder, or one in BEIR's layout"
    )
    form = "[NAME=]QUESTIONS@CORPUS|FOLDER"
    kind.add_argument("--data", nargs="+", required=True, metavar=form, help=data)
    add_fields_option(kind)
    names = "comma-separated: hashed, bm25, minilm, hybrid, hybrid+rerank"
    kind.add_argument("--retrievers", default="hashed,bm25,minilm,hybrid", help=names)
    reranker = "reranker of hybrid+rerank: name or folder of a cross-encoder, or llm (listwise)"
    kind.add_argument("--reranker", default="", help=reranker)
    llm = f"language model of --reranker llm: openai:MODEL[@URL], or {MODEL_FORMS}"
    kind.add_argument("--llm", default="", help=llm)
    candidates = "hits that hybrid fuses and reranks; 0 = 100"
    kind.add_argument("--candidates", type=natural, default=0, help=candidates)
    kind.add_argument("--limit", type=natural, default=0, help="questions per set; 0 = all")
    out = "write the table to OUT.json and OUT.md"
    kind.add_argument("--out", type=local, metavar="OUT", help=out)
    kind.add_argument(
        "--workdir",
        type=local,
        default=pathlib.Path("runs/retrieval"),
        help="folder of indexes and finished cells (resumable)",
    )


def _add_model_options(kind: argparse.ArgumentParser, numbers: Numbers) -> None:
    """Options of a model with random weights, and integers; only a default may be 0."""
    kind.add_argument("--shape", default="qwen2.5-0.5b", help=MODEL)
    for name, default, text in numbers:
        minimum = positive if default else natural
        kind.add_argument(f"--{name}", type=minimum, default=default, help=text)
    dtypes = ("bfloat16", "float32")
    kind.add_argument("--dtype", default="bfloat16", choices=dtypes, help="dtype of computation")
    attention = ("auto", "xla")
    kind.add_argument("--attention", default="auto", choices=attention, help="attention kernel")


def _add_sample_options(kind: argparse.ArgumentParser) -> None:
    numbers = (
        ("prompts", 64, "number of prompts"),
        ("siblings", 8, "continuations per prompt"),
        ("prompt", 512, "tokens per prompt"),
        ("new", 1024, "max new tokens per continuation"),
        ("mean", 0, "mean new tokens per continuation, exponentially distributed; 0 = all --new"),
        ("batch", 64, "prompts sampled together"),
        ("turns", 1, "turns per conversation"),
        ("observation", 256, "tokens between two turns"),
        ("kept-contexts", 0, "how many contexts of the longest length are kept from turn to turn"),
        ("repeats", 3, "number of timed rollouts, after one that compiles"),
    )
    _add_model_options(kind, numbers)


def _add_train_options(kind: argparse.ArgumentParser) -> None:
    numbers = (
        ("prompts", 32, "number of prompts"),
        ("siblings", 8, "actions per prompt"),
        ("prompt", 1024, "tokens per prompt"),
        ("new", 128, "tokens per action"),
        ("layers", 0, "number of layers; 0 = that of --shape"),
        ("vocabulary", 0, "vocabulary size; 0 = that of --shape"),
        ("tokens", 65536, "tokens per batch of rows; gradients of several batches are accumulated"),
        ("repeats", 3, "number of timed steps, after one that compiles"),
    )
    _add_model_options(kind, numbers)
    remat = ("none", "full", "dots")
    kind.add_argument("--remat", default="full", choices=remat, help="gradient checkpointing")
    text = "put each action into its own row, instead of the siblings of a prompt into shared rows"
    kind.add_argument("--ungrouped", action="store_true", help=text)


def _print_result(measure: Callable[..., Any], options: argparse.Namespace) -> None:
    with own_prints():
        result = measure(options)
    if isinstance(result, str):
        print(result, end="")
    else:
        print(json.dumps(result, indent=None if options.json else 2))


def measure_step(options: argparse.Namespace) -> dict[str, Any]:
    import tempfile

    from jax_ragrl.bench.step import bench_step
    from jax_ragrl.models.published import published_config
    from jax_ragrl.run.load import load_job

    job = load_job(load_config(None, options.config))
    config = None if options.shape is None else published_config(options.shape)
    # A new folder has no index, so building one adds to the start, not to the measured steps.
    with tempfile.TemporaryDirectory() as folder:
        workdir = options.workdir or pathlib.Path(folder)
        return bench_step(job, workdir, options.repeats, config)


def measure_credit(options: argparse.Namespace) -> dict[str, Any] | str:
    from jax_ragrl.bench.credit import Audit, bench_credit
    from jax_ragrl.bench.retrieval import markdown

    rules, widths = tuple(filter(None, options.rules.split(","))), parse_numbers(options.widths)
    audit = _from_options(
        Audit, argparse.Namespace(**{**vars(options), "rules": rules, "widths": tuple(widths)})
    )
    table = bench_credit(load_config(DEFAULT_CONFIG, options.config), audit, options.folder)
    if options.json:
        return table
    shown = [row for row in table["rows"] if row["group"] == "all"]
    return markdown({**table, "rows": shown, "errors": []})


def measure_sample(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.sample import SampleWork, bench_sample

    return bench_sample(_from_options(SampleWork, options))


def measure_retrieval(options: argparse.Namespace) -> dict[str, Any] | str:
    from jax_ragrl.bench import retrieval
    from jax_ragrl.corpus.fields import parse_fields

    fields = parse_fields(options.fields)
    sets = [data for text in options.data for data in retrieval.parse_set(text, fields)]
    names = options.retrievers.split(",")
    retrievers = retrieval.sections(names, options.reranker, options.llm, options.candidates)
    settings = (options.workdir, options.limit, options.llm, fields)
    rows = retrieval.bench_retrieval(sets, retrievers, *settings)
    # Tables are published: absolute folders mean nothing on another machine.
    data = [re.sub(r"(?<![^=@:])/[^@:]*/", "", text.rstrip("/")) for text in options.data]
    words = ["ragrl bench retrieval --data", *data, "--retrievers", options.retrievers]
    for name in ("fields", "reranker", "llm", "candidates", "limit"):
        if value := getattr(options, name):
            words += [f"--{name}", str(value)]
    table = retrieval.table(rows, " ".join(words))
    if options.out:
        retrieval.write_table(table, options.out)
    if not table["rows"]:
        raise UserError(f"every cell failed, the first with: {table['errors'][0]['error']}")
    return table if options.json else retrieval.markdown(table)


def measure_train(options: argparse.Namespace) -> dict[str, Any]:
    from jax_ragrl.bench.train import TrainWork, bench_train

    work = _from_options(TrainWork, options)
    return bench_train(work, share_rows=not options.ungrouped)


def _from_options(cls: Any, options: argparse.Namespace) -> Any:
    """An instance of a dataclass from the options of a command; absent ones keep defaults."""
    given = vars(options)
    return cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})
