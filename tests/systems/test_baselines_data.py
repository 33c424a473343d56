"""What baselines are trained or labelled on: rows, classes, and neighbours."""

from __future__ import annotations

import collections
import dataclasses
import random

import numpy as np
import pytest

from jax_ragrl.errors import EffectError
from jax_ragrl.retrieval.lexical import LexicalEncoder
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.expand import Forced, Tree, once
from jax_ragrl.systems.baselines.adaptive import cheapest, class_rows
from jax_ragrl.systems.baselines.instruct_rag import InstructRAG, parse_rationale
from jax_ragrl.systems.baselines.rows import (
    RATIONALE,
    Row,
    bears_on,
    explained_rows,
    robust_rows,
    vanilla_rows,
)
from jax_ragrl.systems.baselines.skr import SKR, Neighbours, neighbours, unit
from jax_ragrl.systems.baselines.slim_plm import Drafts, SlimPLM, gate_rows
from jax_ragrl.text.prompts import read_numbered
from jax_ragrl.types import Hits, LLMRequest, Message, Passage, Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, passage, system

STYLE = "baselines_tiny"


# --- Rows for a generator ------------------------------------------------------------------------


def asked(i: int, gold: tuple[str, ...] = ()) -> Question:
    return Question(f"q{i}", f"Which number is {i}?", (f"answer {i}", "other"), gold)


def hits(*numbers: int) -> Hits:
    return Hits(tuple(passage(i) for i in numbers), (1.0,) * len(numbers))


def shown(row) -> list[str]:
    return [title for title, _ in read_numbered(STYLE, row.messages[-1].content)]


def test_vanilla_rows_answer_from_the_first_passages_found():
    questions = [asked(1), dataclasses.replace(asked(2), answers=()), asked(3)]
    rows = vanilla_rows(STYLE, questions, [hits(1, 2, 3), hits(4), hits()], 2)
    assert [(row.target, row.role) for row in rows] == [
        ("answer 1", "answer"),
        ("answer 3", "answer"),
    ]
    assert shown(rows[0]) == ["title 1", "title 2"] and shown(rows[1]) == []
    assert "Which number is 1?" in rows[0].messages[-1].content


def test_gold_bears_on_a_question_by_id_or_title_and_else_by_an_answer():
    told = Passage("p1", "title 1", "It holds Answer 7, they say.")
    assert bears_on(asked(7, ("p1",)), told) and bears_on(asked(7, ("title 1",)), told)
    assert not bears_on(asked(7, ("p2",)), told)
    assert bears_on(asked(7), told) and not bears_on(asked(8), told)
    # Whole words: "no" is not in "north".
    assert not bears_on(dataclasses.replace(asked(1), answers=("no",)), Passage("", "", "north"))


def robust(count: int, seed: int = 0):
    """Rows of many questions: gold 1 and 2, of which the search finds 2 on rank 3."""
    questions = [asked(i, ("p1", "title 2")) for i in range(count)]
    corpus = [passage(i) for i in range(40)]
    found = [hits(3, 4, 2, 5, 6, 7, 8)] * count
    return robust_rows(STYLE, questions, found, corpus, 3, random.Random(seed))


def test_contexts_are_relevant_low_or_random_about_evenly():
    kinds = collections.Counter()
    for row in robust(600):
        titles = set(shown(row))
        gold = titles & {"title 1", "title 2"}
        assert len(titles) == 3
        if gold:
            assert titles == {"title 1", "title 2", "title 3"}
        low = titles == {"title 6", "title 7", "title 8"}
        kinds["relevant" if gold else "low" if low else "random"] += 1
    # A third each, four standard deviations.
    assert all(abs(count - 200) < 4 * (600 * 2 / 9) ** 0.5 for count in kinds.values())
    assert len(kinds) == 3


def test_the_order_within_a_context_is_random_and_the_rows_repeat_with_their_seed():
    places = {shown(row).index("title 1") for row in robust(100) if "title 1" in shown(row)}
    assert places == {0, 1, 2}
    assert robust(50) == robust(50) != robust(50, seed=1)


def test_without_gold_what_holds_an_answer_is_relevant():
    told = Passage("x", "x", "answer 5")
    found = Hits((passage(1), told, passage(2)), (1.0,) * 3)
    rows = robust_rows(STYLE, [asked(5)] * 60, [found] * 60, [passage(9)], 1, random.Random(0))
    contexts = {tuple(shown(row)) for row in rows}
    assert contexts == {("x",), ("title 2",), ("title 9",)}


def test_a_rationale_is_learnt_where_it_holds_the_answer_that_was_told():
    replies = {
        "1": " Title 1 tells answer 1.\n",
        "3": "Nothing helps.",
        "4": "It is answer 44.",  # whole words
        "5": "It is other.",  # gold too, but not the answer that was told
        "6": EffectError("down"),
    }
    heard: list[LLMRequest] = []

    def reply(request: LLMRequest):
        heard.append(request)
        return replies[request.messages[-1].content.split()[-1]]

    questions = [asked(int(i)) for i in replies]
    questions.insert(1, dataclasses.replace(asked(2), answers=()))
    writer = Tape({}, told={"explain": reply})
    rows = explained_rows(STYLE, questions, [hits(1, 2, 3)] * 6, 2, writer)
    shown = "1 title 1: text 1\n2 title 2: text 2\nQuestion: Which number is 1?"
    assert rows == [
        Row(
            (Message("user", f"instruct\n{shown}"),),
            "Title 1 tells answer 1.\nSo the answer is: answer 1",
            "answer",
        )
    ]
    told = (Message("user", f"explain\n{shown}\nAnswer: answer 1"),)
    assert heard[0] == LLMRequest("explain", told, RATIONALE) and len(heard) == 5


def test_a_rationale_is_learnt_as_it_is_asked_for_and_read():
    tape = Tape({}, told={"explain": "It is Ulm."})
    found = tape.search([ANN.text], 2)
    (row,) = explained_rows(STYLE, [ANN], found, 2, tape)
    told = Tape({}, told={"instruct": row.target})
    leaf = collect(InstructRAG(STYLE, 2), once, [ANN], told.environment()).records[-1]
    assert told.prompts == [row.messages[-1].content] and leaf.answer == "Ulm"
    assert parse_rationale(row.target).valid


# --- Classes -------------------------------------------------------------------------------------


def forced_forest(right: dict[str, set[str]]):
    """C-3PO's three strategies on Ann, Bob and Cid; `right` says which answer rightly."""
    cid = Question("q-cid", "Where was Cid born?", ("Bonn",), hops=2)

    def answer(kind: str):
        def reply(request):
            name = request.messages[-1].content.split()[-2]
            return "right" if kind in right.get(name, ()) else "wrong"

        return reply

    def write(role, prompt, rng):
        return "Thought: t\nAction: [LLM]" if role == "decision" else "Thought: t\nAction: [1]"

    told = {"answer_direct": answer("none"), "answer": answer("some"), "roadmap": "1. one"}
    tape = Tape(write, told=told)
    forest = collect(system(), PAPER, [ANN, BOB, cid], tape.environment())
    reward_N = np.array([float(r.answer == "right") for r in forest.records], np.float32)
    return forest, reward_N


def test_the_class_is_the_cheapest_strategy_that_was_right():
    # Planning hands over without a search here, so it answers like direct answering does.
    forest, reward_N = forced_forest({"Ann": {"none", "some"}, "Bob": {"some"}})
    assert cheapest(forest, reward_N) == {0: "A", 1: "B", 2: "C"}
    # Only the planned branches are right: C, whatever the hops.
    planned_N = np.array(
        [getattr(r.state, "strategy", "") == "Planning" and r.role == "leaf"
         for r in forest.records], np.float32)  # fmt: skip
    assert set(cheapest(forest, planned_N).values()) == {"C"}
    # Nothing right: by the number of hops.
    assert cheapest(forest, 0 * reward_N) == {0: "B", 1: "B", 2: "C"}


def test_questions_whose_environment_failed_have_no_class():
    tape = Tape({"filter": ["Thought: t\nAction: [1]"]},
                found={BOB.text: EffectError("down")})  # fmt: skip
    one = Tree(forced={"router": (Forced("[Retrieval] $question"),)}, until=0)
    forest = collect(system(), one, [BOB], tape.environment())
    assert cheapest(forest, forest.reward_N) == {}


def test_class_rows_are_what_the_classifier_reads_and_writes():
    forest, reward_N = forced_forest({"Ann": {"none"}})
    names, rows = zip(*class_rows(STYLE, forest, reward_N), strict=True)
    assert names == ("q-ann", "q-bob", "q-cid")
    assert [(row.target, row.role) for row in rows] == [(c, "classifier") for c in "ABC"]
    assert ANN.text in rows[0].messages[-1].content


def test_the_gate_learns_whether_a_draft_was_right_from_what_it_reads():
    def write(role, prompt, rng):
        if role == "drafter":
            return " " if "Bob" in prompt else "In Ulm, I think.\n"
        return "A" if role == "gate" else "query"

    tape = Tape(write)
    cid = Question("q-cid", "Where was Cid born?", ("Bonn", "Lm"))
    bare = Question("q-bare", "Where was Dan born?", ())
    forest = collect(SlimPLM(STYLE, 2), once, [ANN, BOB, cid, bare], tape.environment())
    names, rows = zip(*gate_rows(STYLE, forest), strict=True)
    assert names == ("q-ann", "q-bob", "q-cid")
    assert [(row.target, row.role) for row in rows] == [("A", "gate"), ("B", "gate"), ("B", "gate")]
    read = [prompt for prompt in tape.prompts if prompt.startswith("gate")]
    assert [row.messages[-1].content for row in rows] == read[:3]
    assert read[0] == f"gate A B\nQuestion: {ANN.text}\nDraft: In Ulm, I think."
    assert read[1] == f"gate A B\nQuestion: {BOB.text}\nDraft: "
    alone = Tape(write)
    again = collect(Drafts(STYLE), once, [ANN, BOB, cid, bare], alone.environment())
    assert gate_rows(STYLE, again) == gate_rows(STYLE, forest)
    assert set(alone.log) == {("drafter",)}  # nothing is searched, judged or answered


# --- SKR -----------------------------------------------------------------------------------------

TEXTS = ("film alpha", "film beta", "song gamma", "song delta", "film song")


def taught(alone: list[float], retrieved: list[float], k: int = 2) -> Neighbours:
    encoder = LexicalEncoder.fit([Passage("", "", text) for text in TEXTS])
    questions = [Question(text, text, ("x",)) for text in TEXTS]
    return neighbours(encoder, questions, np.array(alone), np.array(retrieved), k)


def test_the_nearest_questions_decide():
    known = taught([0, 0, 1, 1, 0], [1, 1, 0, 0, 0])
    assert len(known.helps_X) == 4  # the last one scored equally: it teaches nothing
    assert known.helps("which film") and not known.helps("which song")


def test_half_of_the_neighbours_is_enough_to_search():
    assert taught([0, 1, 1, 1, 0], [1, 0, 0, 0, 0]).helps("film")
    assert not taught([0, 1, 1, 1, 0], [1, 0, 0, 0, 0], k=3).helps("film")


def test_where_nothing_is_known_it_searches():
    nan = float("nan")
    assert taught([nan, 1, 0, 1, 0], [1, 1, 0, 1, nan]).helps("song")
    assert SKR(STYLE, 2).start(ANN).documents is None


def test_unit_rows_have_length_one_and_zero_rows_stay():
    rows = unit(np.array([[3.0, 4.0], [0.0, 0.0]], np.float32))
    np.testing.assert_allclose(rows, [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "asked"), [("which film", ["search", "answer"]), ("which song", ["answer_direct"])]
)
def test_skr_searches_where_retrieval_helped(text, asked):
    tape = Tape({})
    gated = SKR(STYLE, 2, taught([0, 0, 1, 1, 0], [1, 1, 0, 0, 0]))
    collect(gated, PAPER, [dataclasses.replace(ANN, text=text)], tape.environment())
    assert [entry[0] for entry in tape.log] == asked
