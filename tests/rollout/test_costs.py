"""Rewards, costs and searches of rollouts, per question, per role and per step."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.learner.packing import turns_of
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.rollout.costs import COSTS, Prices, costs_of, role_costs, step_costs
from jax_ragrl.rollout.rewards import answer_rewards, leaf_rewards, rewards_of
from jax_ragrl.rollout.searches import search_turns, trajectory_measures
from jax_ragrl.rollout.tree import SEARCH, Call, Record
from jax_ragrl.run.evaluate import evaluate, table
from jax_ragrl.runtime import records
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from jax_ragrl.text.metrics import METRICS
from jax_ragrl.training.rollout_metrics import rollout_recall
from jax_ragrl.types import Question
from tests.rollout.tape import ANN, BOB, PAPER, Tape, passage, play

ULM = MeteredReply("Ulm", 700, 30)


def single(answer: str = "Ulm") -> Tape:
    texts = {"router": ["[Retrieval] Ann"], "filter": ["Thought: t\nAction: [1]"]}
    return Tape(texts, replies={"answer": answer})


def test_costs_have_the_longest_context_and_leave_out_calls_that_were_not_made():
    forest = play(single())
    sizes = [len(r.action.prompt_ids + r.action.ids) for r in forest.records if r.action]
    (cost,) = costs_of(forest)
    assert len(sizes) == 2 and cost["peak_context"] == max(sizes)
    tokens = sum(len(r.action.ids) for r in forest.records if r.action)
    assert (cost["policy_calls"], cost["policy_tokens"]) == (2, tokens)
    assert 0 < cost["llm_prompt_tokens"] < 700 and cost["llm_completion_tokens"] == 1
    tape = Tape({"router": ["[No Retrieval]"]}, replies={"answer_direct": ULM})
    costs = step_costs(play(tape))
    assert costs == {"llm_calls": 1, "llm_prompt_tokens": 700, "llm_completion_tokens": 30}


def test_prices_turn_counts_into_dollars():
    prices = Prices(2.0, 10.0, 0.005)
    (cost,) = costs_of(play(single(ULM)), prices)
    assert {*cost} == {*COSTS}
    expected = 700 * 2e-6 + 30 * 1e-5 + 0.005
    assert cost["dollars"] == pytest.approx(expected)
    assert step_costs(play(single(ULM)), prices)["dollars"] == pytest.approx(expected)
    assert "dollars" not in costs_of(play(single(ULM)))[0] | step_costs(play(single(ULM)))
    with pytest.raises(UserError, match=r"dollars_per_search is -1: .* 0 or more"):
        Prices(dollars_per_search=-1)


def test_role_costs_are_means_per_question_of_replies_metered_by_their_process():
    forest = play(single(ULM))
    costs = role_costs([forest, forest])
    assert costs["llm"] == {"answer": {"calls": 1, "prompt_tokens": 700, "completion_tokens": 30}}
    for record in forest.records[:2]:
        assert record.action is not None and costs["policy"][record.role] == {
            "calls": 1,
            "prompt_tokens": len(record.action.prompt_ids),
            "completion_tokens": len(record.action.ids),
        }
    assert set(costs["policy"]) == {"router", "filter"}
    for reply in (ULM, records.loads(records.dumps(ULM))):
        assert reply == "Ulm" and hash(reply) == hash("Ulm")
        assert (reply.prompt_tokens, reply.completion_tokens) == (700, 30)


def test_a_call_above_several_leaves_counts_once():
    """Three routes; in the third, two decisions share a roadmap and make equal requests."""
    texts = iter("ab" * 9)
    text_of = {
        "filter": lambda: "Thought: t\nAction: [1]",
        "decision": lambda: f"Thought: {next(texts)}\nAction: [LLM]",
    }
    reply_of = {
        "roadmap": MeteredReply("1. one step", 100, 10),
        "answer": ULM,
        "answer_direct": ULM,
    }
    tape = Tape(lambda role, prompt, rng: text_of[role](), replies=reply_of)
    forest = play(tape, expander=PAPER)
    assert len(forest.leaf_N.nonzero()[0]) == 4
    assert step_costs(forest) == {
        "retrieval_calls": 1.0,
        "passages": 2.0,
        "llm_calls": 5.0,  # a roadmap, and an answer for each leaf
        "llm_prompt_tokens": 4 * 700.0 + 100,
        "llm_completion_tokens": 4 * 30.0 + 10,
    }


def leaf(*rounds: tuple[int, tuple[int, ...]]) -> Record:
    """A leaf after searches, each with its round and the numbers of its passages."""
    calls = [
        Call(SEARCH, 0, number, "query", passages=tuple(map(passage, passages)))
        for number, passages in rounds
    ]
    return Record(-1, 0, "leaf", 0, (), calls=(*calls, Call("answer", 0, 9, "prompt")))


GOLD = Question("q", "?", ("x",), gold=("p1", "title 4"), hops=2)


def test_measures_of_a_trajectory_whose_concurrent_searches_share_a_turn():
    measures = trajectory_measures(GOLD, leaf((1, (2, 1)), (2, (4,))), turns=3)
    assert [measures[f"recall/turn_{t}"] for t in (1, 2, 3)] == [0.5, 1.0, 1.0]
    assert (measures["recall"], measures["mrr@10"]) == (1.0, 0.5)
    assert (measures["recall/hop_1"], measures["recall/hop_2"]) == (1.0, 1.0)
    none = trajectory_measures(GOLD, leaf(), turns=1)
    assert set(none.values()) == {0.0} and "recall/turn_1" in none
    turns = search_turns(leaf((1, (2, 3)), (1, (1,)), (4, (3,))))
    assert [[p.id for p in turn] for turn in turns] == [["p2", "p3", "p1"], ["p3"]]


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


WRONG = [None, float("nan"), float("inf"), -np.inf, "1.0", "", [1.0], (), {}, 1j, 1e300, 10**5000]


def forest():
    tape = Tape({"router": ["[No Retrieval]"] * 2}, replies={"answer_direct": "Ulm"})
    return play(tape, ANN, BOB)


def for_bob(value):
    def my_reward(question, answer):
        return value if question.id == BOB.id else 1.0

    return my_reward


@pytest.mark.parametrize("value", WRONG, ids=lambda value: type(value).__name__)
def test_a_reward_that_is_no_finite_number_names_the_question_and_the_function(value):
    with pytest.raises(UserError, match=r"my_reward returned .* 'q-bob' \('Where was Bob"):
        leaf_rewards(functools.partial(for_bob(value)), forest())
    with pytest.raises(UserError, match=r"<lambda> returned .*q-ann"):
        answer_rewards(forest(), lambda answer, gold: value)


def test_a_metric_that_is_no_finite_number_names_the_question(monkeypatch):
    monkeypatch.setitem(METRICS, "own", lambda answer, gold: None)
    tape = Tape({}, replies={"answer_direct": "Ulm"})
    with pytest.raises(UserError, match="<lambda> returned .*q-ann"):
        evaluate(direct("c3po_tiny"), [ANN], tape.environment())


@pytest.mark.parametrize(
    "value", [True, 1, np.True_, np.float16(1), np.int8(1), np.ones(()), jnp.ones(())]
)
def test_numbers_of_python_numpy_and_jax_are_rewards(value):
    reward_N = leaf_rewards(for_bob(value), forest())
    assert reward_N.dtype == np.float32 and sorted(set(reward_N.tolist())) == [0.0, 1.0]


def test_the_reward_of_a_recipe_has_a_finite_number_per_node():
    own = forest()
    assert rewards_of(lambda f: [0] * len(f.records), own).dtype == np.float32
    for value in (None, np.nan):
        with pytest.raises(UserError, match="<lambda> returned .*q-ann"):
            rewards_of(lambda f, v=value: [v] * len(f.records), own)
    with pytest.raises(UserError, match="one number per node"):
        rewards_of(lambda f: np.zeros(1), own)


def test_credit_that_is_not_finite_names_the_question_unless_it_failed_or_its_weight_is_zero():
    own = forest()
    credit_N, weight_N = np.full((2, len(own.records)), np.nan, np.float32)
    weight_N[:] = 0
    assert turns_of(own, credit_N, weight_N) == []
    with pytest.raises(UserError, match="credit of role 'router' for question 'q-ann' is nan"):
        turns_of(own, credit_N, weight_N + 1)
    down = {"answer_direct": lambda r: EffectError("down") if "Bob" in str(r.messages) else "Ulm"}
    tape = Tape({"router": ["[No Retrieval]"] * 2}, replies=down)
    assert leaf_rewards(for_bob(None), play(tape, ANN, BOB)).max() == 1.0
