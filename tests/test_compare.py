"""The table of systems: every name is a system, bad names are refused, rows are split."""

from __future__ import annotations

import dataclasses
import pathlib

import pytest

from jax_ragrl.cli import main
from jax_ragrl.compare import LEARNERS, SYSTEMS, Bench, Setting, chosen, row
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import UserError
from jax_ragrl.evaluate import evaluate
from jax_ragrl.retrieval.dense import DenseRetriever
from jax_ragrl.retrieval.exact import ExactSearcher
from jax_ragrl.retrieval.lexical import LexicalEncoder
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.text.prompts import template
from tests.rollout.tape import ANN, BOB, Tape, passage

NOWHERE = pathlib.Path("nowhere")


def setting(*systems: str, **changes) -> Setting:
    given = Setting(NOWHERE, NOWHERE, NOWHERE, systems, "tiny", "tiny", "tiny", 2, 0)
    return given._replace(**changes)


def bench(style: str = "tiny", train=(ANN, BOB)) -> Bench:
    corpus = Corpus(tuple(passage(i) for i in range(9)))
    encoder = LexicalEncoder.fit(corpus.passages)
    searcher = ExactSearcher(encoder.encode_passages(corpus.passages))
    retriever = DenseRetriever(corpus, encoder, searcher)
    tape = Tape(lambda role, prompt, rng: {"classifier": "B"}.get(role, "[No Retrieval]"))
    return Bench(style, 2, Environment(tape, retriever, tape), retriever, train)


@pytest.mark.parametrize("style", ["tiny", "full"])
@pytest.mark.parametrize("name", SYSTEMS)
def test_every_name_is_a_system_in_every_style(name, style):
    table = bench(style)
    system = SYSTEMS[name](table)
    assert system.style.endswith("_tiny") == (style == "tiny") and system.top_k in (0, 2)
    assert template(system.style, "document").template
    result = evaluate(system, [ANN, BOB], table.environment)
    assert sum(result.ended.values()) == 2 and "failed" not in result.ended


def test_all_is_every_system_that_can_be_built():
    assert chosen(setting("all", train=NOWHERE)) == tuple(SYSTEMS)
    assert set(SYSTEMS) - set(chosen(setting("all"))) == LEARNERS
    assert chosen(setting("ircot", "direct")) == ("ircot", "direct")


def test_unknown_names_and_styles_are_refused():
    with pytest.raises(UserError, match=r"'nope'.*direct.*ircot.*c3po"):
        chosen(setting("direct", "nope"))
    with pytest.raises(UserError, match="'c3po_tiny'.*tiny or full"):
        chosen(setting("direct", style="c3po_tiny"))


def test_what_learns_from_questions_asks_for_them():
    with pytest.raises(UserError, match="--train"):
        SYSTEMS["skr_knn"](bench(train=()))


def test_the_command_refuses_before_it_reads_anything(capsys):
    given = ("--corpus", "x", "--questions", "x", "--index", "x", "--systems", "direct,nope")
    assert main(("evaluate", *given)) == 2
    line = capsys.readouterr().err.strip()
    assert line.startswith("ragrl: unknown system 'nope'") and "\n" not in line


def test_rows_are_split_by_hops_and_kind_where_these_are_known():
    table = bench()
    plain = [dataclasses.replace(q, hops=0) for q in (ANN, BOB)]
    result = evaluate(SYSTEMS["direct"](table), plain, table.environment)
    assert {"hops", "kinds"} & set(row(result, plain)) == set()
    mixed = [dataclasses.replace(ANN, kind="chain"), dataclasses.replace(BOB, hops=2)]
    split = row(result, mixed)
    assert set(split["hops"]) == {"1", "2"} and set(split["kinds"]) == {"chain", ""}
    assert split["hops"]["1"]["em"][0] == 100.0 and split["hops"]["2"]["em"][0] == 0.0
