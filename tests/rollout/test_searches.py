"""The passages of a rollout, in the order in which its searches returned them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_ragrl.errors import EffectError
from jax_ragrl.rollout.searches import search_turns, seen_passages, trajectory_measures
from jax_ragrl.rollout.tree import SEARCH, Call, Record
from jax_ragrl.run.evaluate import evaluate, table
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.training.rollout_metrics import rollout_recall
from jax_ragrl.types import Question
from tests.rollout.tape import ANN, BOB, Tape, passage, play


def leaf(*rounds: tuple[int, tuple[int, ...]]) -> Record:
    """A leaf after searches, each with its round and the numbers of its passages."""
    calls = [
        Call(SEARCH, 0, number, "query", passages=tuple(map(passage, passages)))
        for number, passages in rounds
    ]
    return Record(-1, 0, "leaf", 0, (), calls=(*calls, Call("answer", 0, 9, "prompt")))


GOLD = Question("q", "?", ("x",), gold=("p1", "title 4"), hops=2)


def test_concurrent_searches_share_a_turn():
    turns = search_turns(leaf((1, (2, 3)), (1, (1,)), (4, (3,))))
    assert [[p.id for p in turn] for turn in turns] == [["p2", "p3", "p1"], ["p3"]]


def test_passages_are_listed_once_in_order_of_appearance():
    passages = seen_passages(leaf((1, (2, 3)), (2, (3, 1, 2))))
    assert [p.id for p in passages] == ["p2", "p3", "p1"]


def test_measures_of_a_trajectory():
    measures = trajectory_measures(GOLD, leaf((1, (2, 1)), (2, (4,))), turns=3)
    assert [measures[f"recall/turn_{t}"] for t in (1, 2, 3)] == [0.5, 1.0, 1.0]
    assert (measures["recall"], measures["mrr@10"]) == (1.0, 0.5)
    assert (measures["recall/hop_1"], measures["recall/hop_2"]) == (1.0, 1.0)
    none = trajectory_measures(GOLD, leaf(), turns=1)
    assert set(none.values()) == {0.0} and "recall/turn_1" in none


def test_an_evaluation_measures_questions_with_gold_that_did_not_fail():
    gold = [dataclasses.replace(q, gold=("p1",)) for q in (ANN, BOB)]
    down = {"answer": lambda r: EffectError("down") if "Bob" in r.messages[-1].content else "Ulm"}
    result = evaluate(
        StandardRAG("c3po_tiny", 2), [*gold, GOLD, ANN], Tape({}, replies=down).environment()
    )
    np.testing.assert_array_equal(result.retrieval["recall"], [1.0, np.nan, 0.5, np.nan])
    assert result.summary()["retrieval"]["recall"] == 75.0
    assert [len(passages) for passages in result.passages] == [2, 0, 2, 2]
    rows = table(result, [*gold, GOLD, ANN], lambda question: question.id)
    assert rows["q"]["recall"] == [50.0, 1.25, 98.75] and "recall" not in rows[BOB.id]


def test_an_evaluation_without_gold_has_no_retrieval_measures():
    result = evaluate(StandardRAG("c3po_tiny", 2), [ANN], Tape({}).environment())
    assert not result.retrieval and "retrieval" not in result.summary()


def test_training_metrics_separate_the_first_search_from_all_searches():
    texts = {
        "router": ["[Planning]"],
        "decision": [
            "Thought: t\nAction: [Retrieval] a",
            "Thought: t\nAction: [Retrieval] b",
            "Thought: done\nAction: [LLM]",
        ],
        "filter": ["Thought: t\nAction: [1]"] * 2,
    }
    tape = Tape(
        texts, {"a": [passage(1)], "b": [passage(4)]}, {"roadmap": "1. one step", "answer": "Ulm"}
    )
    forest = play(tape, dataclasses.replace(ANN, gold=("p1", "p4")))
    metrics = rollout_recall(forest)
    assert metrics["retrieval/recall_per_rollout"] == 1.0
    assert metrics["retrieval/recall_first_search"] == pytest.approx(0.5)
    assert rollout_recall(play(Tape({"router": ["[No Retrieval]"]}), ANN)) == {}
