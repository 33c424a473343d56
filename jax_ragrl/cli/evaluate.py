"""Commands that show results: `report` and `evaluate`."""

from __future__ import annotations

import argparse
import pathlib
import warnings
from typing import TYPE_CHECKING

from jax_ragrl.cli.common import (
    MODEL_FORMS,
    AddCommand,
    add_fields_option,
    output_folder,
    print_json,
    show,
    text_file,
)
from jax_ragrl.config.arguments import natural
from jax_ragrl.config.functions import own_prints
from jax_ragrl.config.schema import local
from jax_ragrl.corpus.data_path import data_path, set_name
from jax_ragrl.errors import UserError

if TYPE_CHECKING:
    from jax_ragrl.evaluation.table import TableSettings


def add_report(command: AddCommand) -> None:
    summary = "write report.html of a run, and explorer.html of the predictions of runs and tables"
    sub = command("report", run_report, summary)
    folders = "folder of a run or of a table; several: their predictions side by side"
    sub.add_argument("folders", nargs="+", type=local, metavar="FOLDER", help=folders)
    out = "folder of the pages (default: the first FOLDER)"
    sub.add_argument("--out", type=local, help=out)
    live = "serve both pages instead of writing them: they follow the run while it trains"
    sub.add_argument("--serve", action="store_true", help=live)
    sub.add_argument(
        "--port", type=natural, default=8001, help="TCP port of --serve; 0 = any free port"
    )


def add_evaluate(command: AddCommand) -> None:
    sub = command("evaluate", run_evaluate, "evaluate systems on questions", takes_config=True)
    sub.epilog = (
        "--config.recipe.KEY=VALUE and --config.shapes.KEY=VALUE change the systems of --run."
    )
    _add_system_options(sub)
    _add_question_options(sub)
    _add_output_options(sub)


def _add_system_options(sub: argparse.ArgumentParser) -> None:
    systems = (
        "comma-separated names of systems; all, or workflows for MAO-ARAG's fixed workflows "
        "(default: direct,standard_rag, and c3po if there is a --policy)"
    )
    sub.add_argument("--systems", help=systems)
    runs = "folders of runs: adds one row per run, for its system with its trained policies"
    sub.add_argument("--run", dest="runs", nargs="+", default=(), metavar="WORKDIR", help=runs)
    sub.add_argument(
        "--policy",
        default="",
        help=f"policy of the other systems: openai:MODEL[@URL], or {MODEL_FORMS} (default: tiny, "
        "and none beside another --llm than tiny and world:)",
    )
    examples = "demonstrations (of ragrl warmup demos) before the prompts of an openai: policy"
    sub.add_argument("--examples", type=data_path, metavar="FILE", help=examples)
    shots = "examples per role, with --examples"
    sub.add_argument("--shots", type=natural, default=2, help=shots)
    llm = (
        "frozen language model: openai:MODEL[@URL], world:FOLDER (the rule-based reader of a "
        f"generated corpus), or {MODEL_FORMS}"
    )
    sub.add_argument("--llm", default="tiny", help=llm)
    judge = "language model that grades answers, in the format of --llm; adds the score 'judge'"
    sub.add_argument("--judge", default="", help=judge)
    sub.add_argument("--int8", action="store_true", help="int8 weights for a local --llm")
    style = "style of the prompts: tiny, for --llm tiny and world:, or full, for other models"
    sub.add_argument("--style", default="", help=f"{style} (default: that of --llm)")
    sub.add_argument("--top-k", type=natural, default=5, help="passages per search")
    prices = "dollars per million prompt tokens and completion tokens of --llm, and per search"
    sub.add_argument(
        "--prices", type=prices_of, default=(), metavar="PROMPT,COMPLETION[,SEARCH]", help=prices
    )
    sub.add_argument("--train", type=data_path, help="labeled training questions, for skr_knn")


def _add_question_options(sub: argparse.ArgumentParser) -> None:
    # Several sets resume; one set may be printed as JSON.
    questions = sub.add_mutually_exclusive_group(required=True)
    questions.add_argument("--questions", type=data_path, help="one question set; needs --index")
    questions.add_argument(
        "--data",
        nargs="+",
        metavar="[NAME=]QUESTIONS[@CORPUS]",
        help="several question sets in one table; a set without its own passages uses --corpus",
    )
    add_fields_option(sub)
    limit = "questions per set, a random sample; 0 = all"
    sub.add_argument("--limit", type=natural, default=0, help=limit)
    corpus = "file or folder of passages (default: those stored in --index)"
    sub.add_argument("--corpus", type=data_path, help=corpus)
    sub.add_argument(
        "--index", dest="index_folder", type=local, help="folder of 'ragrl data index'"
    )
    retriever = (
        "search server or web search engine (serper, searxng), instead of a corpus and index"
    )
    sub.add_argument("--retriever", default="", metavar="URL|ENGINE[@URL]", help=retriever)
    encoder = "encoder of newly built indexes, with --data, or bm25 for indexes of words"
    sub.add_argument("--encoder", default="bm25", help=encoder)


def _add_output_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--out", type=text_file, help="output file of the table (JSON), with --questions"
    )
    numbers = "print the table as JSON with all numbers, with --questions"
    sub.add_argument("--json", action="store_true", help=numbers)
    predictions = (
        "output folder of predictions, one file per system: question, answer, passages, trace, "
        "scores and costs, for 'ragrl report FOLDER' (default: --workdir, with --data)"
    )
    sub.add_argument("--predictions", type=output_folder, metavar="FOLDER", help=predictions)
    sub.add_argument(
        "--workdir",
        type=local,
        default=pathlib.Path("runs/table"),
        help="output folder of rows, table and indexes, with --data (resumable)",
    )
    cache = (
        "send every request to a language model on a server again; otherwise replies of earlier "
        "tables in the folder of --out or --workdir are used (llm_cache.sqlite)"
    )
    sub.add_argument("--no-cache", action="store_true", help=cache)
    replies = "recorded replies of language models on servers, which 'ragrl replies' wrote"
    sub.add_argument("--replies", type=data_path, metavar="FILE", help=replies)
    only = "a request without a recorded reply is an error: no server is needed"
    sub.add_argument("--replies-only", action="store_true", help=f"with --replies, {only}")


def prices_of(text: str) -> tuple[float, ...]:
    """Parses two or three prices, separated by commas."""
    try:
        prices = tuple(float(part) for part in text.split(","))
    except ValueError:
        prices = ()
    if len(prices) not in (2, 3):
        raise UserError(f"{text!r} is not a list of prices: give two or three, such as 0.15,0.6")
    return prices


def run_report(options: argparse.Namespace) -> None:
    from jax_ragrl.report.build import build_report
    from jax_ragrl.report.explorer import build_explorer, has_pages
    from jax_ragrl.report.load import METRICS

    if options.serve:
        from jax_ragrl.serve.live import serve_report

        return serve_report(options.folders, options.port)
    first = options.folders[0]
    out = options.out or first
    if options.out:
        out.mkdir(parents=True, exist_ok=True)
    has_rows = len(options.folders) > 1 or has_pages(first)
    # A table has predictions alone, a run that has not answered yet metrics alone.
    if (first / METRICS).exists() or not has_rows:
        print(build_report(first, out))
    elif (first / "checkpoints").is_dir():
        warnings.warn(
            f"{first / METRICS} is missing, so that there is no report of this run: restore the "
            "file from a copy; the explorer shows the rest",
            stacklevel=2,
        )
    if has_rows:
        print(build_explorer(options.folders, out / "explorer.html"))


def run_evaluate(options: argparse.Namespace) -> None:
    from jax_ragrl.llm.cache import print_hits

    for option in ("json", "out") if options.data else ():
        if getattr(options, option):
            raise UserError(
                f"--{option} is for one question set: give --questions instead of --data, or read "
                f"{options.workdir / 'rows.jsonl'}"
            )
    if options.data:
        _evaluate_suite(_table_settings(options), options)
    else:
        _evaluate_set(_table_settings(options), options.out, as_json=options.json)
    print_hits()


def _table_settings(options: argparse.Namespace) -> TableSettings:
    from jax_ragrl.corpus.fields import parse_fields
    from jax_ragrl.evaluation.table import RUN, TableSettings
    from jax_ragrl.llm.cache import FILE as CACHE_FILE
    from jax_ragrl.models.config import TINY
    from jax_ragrl.rollout.costs import Prices
    from jax_ragrl.run.world_folder import READER

    # The shipped policy and its prompts would be a poor partner of a real model.
    is_real = not (options.llm == TINY or options.llm.startswith(READER))
    policy, style = (options.policy or TINY, "tiny") if not is_real else (options.policy, "full")
    names = options.systems
    if names is None:
        names = "direct,standard_rag" + (",c3po" if policy else "")
    systems = (*names.split(","), *(f"{RUN}{folder}" for folder in options.runs))
    folder = options.workdir if options.data else options.out and options.out.absolute().parent
    # Options that are named as settings.
    same = ("questions", "index_folder", "llm", "top_k", "limit")
    more = ("train", "judge", "int8", "retriever", "shots", "replies", "replies_only")
    return TableSettings(
        **{name: getattr(options, name) for name in (*same, *more)},
        # An index holds its passages.
        corpus=options.corpus or options.index_folder,
        systems=systems,
        policy=policy,
        style=options.style or style,
        overrides=tuple(options.config),
        predictions=options.predictions or (options.workdir if options.data else None),
        prices=Prices(*options.prices),
        policy_examples=options.examples,
        fields=parse_fields(options.fields),
        cache=folder / CACHE_FILE if folder and not options.no_cache else None,
    )


def _evaluate_suite(settings: TableSettings, options: argparse.Namespace) -> None:
    from jax_ragrl.evaluation.suite import evaluate_suite, parse_data
    from jax_ragrl.runtime.compile_cache import enable_compile_cache

    enable_compile_cache(options.workdir)
    sets = [parse_data(text) for text in options.data]
    page, has_scores = evaluate_suite(settings, sets, options.workdir, options.encoder)
    show(page)
    if not has_scores:
        raise UserError(
            "every cell failed: correct the errors listed below the table and run the same command "
            "again"
        )


def _evaluate_set(settings: TableSettings, out: pathlib.Path | None, *, as_json: bool) -> None:
    from jax_ragrl.evaluation.suite import markdown
    from jax_ragrl.evaluation.table import evaluate_table

    if out:  # now, because an evaluation may take hours
        out.parent.mkdir(parents=True, exist_ok=True)
    with own_prints():
        table = evaluate_table(settings, out)
    rows = {name: row for name, row in table.items() if isinstance(row, dict)}
    if as_json:
        print_json(table)
    else:
        data = set_name(str(settings.questions), with_split=True)
        show(markdown([*rows], [data], {(data, name): row for name, row in rows.items()}))
    errors = [row["error"] for row in rows.values() if "error" in row]
    if len(errors) == len(rows):
        raise UserError(
            "no system has a score: correct the error and run the same command again "
            f"({errors[-1]})"
        )
