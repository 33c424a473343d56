"""Commands that search: `data search` and `serve retriever`."""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax_ragrl.cli.common import AddCommand, add_fields_option, show, text_file
from jax_ragrl.cli.serving import add_serving_options, serving_settings
from jax_ragrl.config.arguments import CONFIG_HELP, positive
from jax_ragrl.config.schema import local
from jax_ragrl.corpus.data_path import data_path
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.run.overrides import load_config

if TYPE_CHECKING:
    from jax_ragrl.retrieval.base import Retriever
    from jax_ragrl.types import Hits


def _add_source_options(sub: argparse.ArgumentParser) -> None:
    """Options that select a retriever, of which one is given."""
    sub.add_argument(
        "index", nargs="?", metavar="INDEX_FOLDER", help="folder of 'ragrl data index'"
    )
    corpus = "file of the passages of INDEX_FOLDER (default: those stored in the folder)"
    sub.add_argument("--corpus", type=data_path, help=corpus)
    workdir = "folder of the run of --config, which holds its index (default: a temporary folder)"
    sub.add_argument("--workdir", type=local, help=workdir)
    server = "search server or web search engine (serper, searxng)"
    sub.add_argument("--retriever", default="", metavar="URL|ENGINE[@URL]", help=server)


def add_search(command: AddCommand) -> None:
    summary = "search an index, or the retriever of a config, and print the passages"
    sub = command("data search", run_search, summary, takes_config=True)
    _add_source_options(sub)
    query = "text of the query; with --retriever or --config it is the only positional argument"
    sub.add_argument("query", nargs="?", metavar="QUERY", help=query)
    sub.add_argument("--queries", type=local, metavar="FILE", help="file with one query per line")
    questions = "question file in any known format, whose texts are the queries"
    sub.add_argument("--questions", type=data_path, metavar="FILE", help=questions)
    add_fields_option(sub)
    sub.add_argument("--k", type=positive, default=5, help="passages per query")
    sub.add_argument("--json", action="store_true", help="print one JSON object per query")
    run = "write a TREC run file instead of printing passages"
    sub.add_argument("--run", dest="run_file", type=text_file, metavar="FILE", help=run)
    sub.add_argument("--tag", default="ragrl", help="run name that the file of --run holds")
    sub.epilog = f"{CONFIG_HELP} Give INDEX_FOLDER and QUERY next to each other."


def add_serve_retriever(command: AddCommand) -> None:
    summary = "answer searches over HTTP, in batches, in the form of Search-R1"
    sub = command("serve retriever", run_retriever, summary, takes_config=True)
    _add_source_options(sub)
    add_serving_options(sub, deadline=60.0)
    top_k = "passages per query of requests without topk"
    sub.add_argument("--top-k", type=positive, default=3, help=top_k)
    sub.add_argument("--batch", type=positive, default=256, help="max queries per search")
    waiting = "max queued queries before returning 503"
    sub.add_argument("--waiting", type=positive, default=8192, help=waiting)


@contextlib.contextmanager
def _open_retriever(options: argparse.Namespace) -> Iterator[Retriever]:
    import tempfile

    sources = (options.index, options.retriever, options.config)
    if sum(map(bool, sources)) != 1:
        raise UserError(
            "one retriever is searched: give either INDEX_FOLDER, or --retriever URL, or "
            "--config=FILE"
        )
    values = load_config(None, options.config) if options.config else {}
    # Imported after the checks, because it loads JAX: a wrong option fails at once.
    from jax_ragrl.run import retrievers
    from jax_ragrl.run.index import server_retriever
    from jax_ragrl.run.short_names import parse_index
    from jax_ragrl.runtime.compile_cache import enable_compile_cache

    enable_compile_cache()
    if options.index:
        yield retrievers.open_folder(local(options.index), options.corpus)
    elif options.retriever:
        yield server_retriever(parse_index(options.retriever), None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield retrievers.open_config(values, options.workdir or pathlib.Path(folder))


def run_search(options: argparse.Namespace) -> None:
    if options.query is None and options.index and (options.retriever or options.config):
        # The first positional argument is the query if another option names the retriever.
        options.query, options.index = options.index, None
    queries = _queries(options)
    with _open_retriever(options) as retriever:
        results = retriever.search([text for _, text in queries], options.k)
    if options.run_file:
        _write_run(options, queries, results)
        return
    for (name, text), result in zip(queries, results, strict=True):
        for line in _print_lines(name, text, result, options.json, len(queries) > 1):
            show(line)
    # Every query has its line before the command fails.
    if all(isinstance(result, EffectError) for result in results):
        raise EffectError(str(results[0]))


def _queries(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Pairs of an id and a text."""
    sources = (options.query is not None, bool(options.queries), bool(options.questions))
    if sum(sources) != 1:
        raise UserError("give either one QUERY, or --queries FILE, or --questions FILE")
    if options.query is not None:
        return [("1", options.query)]
    if options.questions:
        from jax_ragrl.corpus.fields import parse_fields
        from jax_ragrl.corpus.formats import load_questions

        questions = load_questions(options.questions, fields=parse_fields(options.fields))
        return [(question.id, question.text) for question in questions]
    from jax_ragrl.corpus.formats.files import read_lines

    if lines := [(str(number), line.strip()) for number, line in read_lines(options.queries)]:
        return lines
    raise UserError(f"{options.queries} holds no queries: give a file with one query per line")


def _write_run(
    options: argparse.Namespace,
    queries: Sequence[tuple[str, str]],
    results: Sequence[Hits | EffectError],
) -> None:
    """Writes the run file, and a line on stderr about queries that failed."""
    from jax_ragrl.retrieval.trec import write_run

    pairs = list(zip(queries, results, strict=True))
    failures = [result for _, result in pairs if isinstance(result, EffectError)]
    rankings = [(q[0], hits) for q, hits in pairs if not isinstance(hits, EffectError)]
    if not rankings:
        # An empty run file would pass for a result.
        raise failures[0]
    write_run(options.run_file, rankings, options.tag)
    if failures:
        print(
            f"ragrl: {len(failures)} of {len(pairs)} queries failed and are not in "
            f"{options.run_file}, the first with: {failures[0]}",
            file=sys.stderr,
        )


def _print_lines(
    name: str, query: str, result: Hits | EffectError, as_json: bool, several: bool
) -> Iterator[str]:
    """The lines of one query; its text precedes them if there are several queries."""
    from jax_ragrl.retrieval.snippets import BOLD, PLAIN, clean, lines

    if as_json:
        values: dict[str, Any] = {"id": name, "query": query}
        if isinstance(result, EffectError):
            values["error"] = str(result)
        else:
            pairs = enumerate(zip(result.passages, result.scores, strict=True), start=1)
            values["hits"] = [{"rank": r, "score": s, **p._asdict()} for r, (p, s) in pairs]
        yield json.dumps(values)
        return
    if several:
        yield f"{clean(name)}: {clean(query)}"
    if isinstance(result, EffectError):
        yield f"     failed: {clean(str(result))}"
        return
    yield from lines(result, query, BOLD if sys.stdout.isatty() else PLAIN)
    if not result.passages:
        yield "     no passages"


def run_retriever(options: argparse.Namespace) -> None:
    from jax_ragrl.serve.search import serve

    limits, settings = serving_settings(options)
    with _open_retriever(options) as retriever:
        serve(retriever, options.top_k, limits, settings)
