"""Costs of rollouts, per question, per role and per step."""

import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.rollout.costs import Prices, costs_of, role_costs, step_costs
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.runtime import records
from jax_ragrl.systems.baselines.standard import StandardRAG
from tests.rollout.tape import ANN, BOB, PAPER, Tape, play

ULM = MeteredReply("Ulm", 700, 30)


def single(answer: str = "Ulm") -> Tape:
    """A tape of one search and one reply."""
    texts = {"router": ["[Retrieval] Ann"], "filter": ["Thought: t\nAction: [1]"]}
    return Tape(texts, replies={"answer": answer})


def test_peak_context_is_the_longest_prompt_with_its_action():
    forest = play(single())
    sizes = [len(r.action.prompt_ids + r.action.ids) for r in forest.records if r.action]
    (cost,) = costs_of(forest)
    assert len(sizes) == 2 and cost["peak_context"] == max(sizes)
    tokens = sum(len(r.action.ids) for r in forest.records if r.action)
    assert (cost["policy_calls"], cost["policy_tokens"]) == (2, tokens)
    assert 0 < cost["llm_prompt_tokens"] < 700 and cost["llm_completion_tokens"] == 1


def test_step_costs_leave_out_calls_that_were_not_made():
    tape = Tape({"router": ["[No Retrieval]"]}, replies={"answer_direct": ULM})
    costs = step_costs(play(tape))
    assert costs == {"llm_calls": 1, "llm_prompt_tokens": 700, "llm_completion_tokens": 30}


def test_prices_turn_counts_into_dollars():
    prices = Prices(2.0, 10.0, 0.005)
    (cost,) = costs_of(play(single(ULM)), prices)
    expected = 700 * 2e-6 + 30 * 1e-5 + 0.005
    assert cost["dollars"] == pytest.approx(expected)
    assert step_costs(play(single(ULM)), prices)["dollars"] == pytest.approx(expected)
    assert "dollars" not in costs_of(play(single(ULM)))[0] | step_costs(play(single(ULM)))
    with pytest.raises(UserError, match=r"dollars_per_search is -1: .* 0 or more"):
        Prices(dollars_per_search=-1)


def test_a_metered_reply_equals_its_text_as_another_process_reads_it():
    for reply in (ULM, records.loads(records.dumps(ULM))):
        assert reply == "Ulm" and hash(reply) == hash("Ulm")
        assert (reply.prompt_tokens, reply.completion_tokens) == (700, 30)


def test_role_costs_are_means_per_question():
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


def test_role_costs_leave_out_failed_questions():
    down = EffectError("down")
    tape = Tape({}, replies={"answer": lambda r: ULM if "Bob" in r.messages[-1].content else down})
    result = evaluate(StandardRAG("c3po_tiny", 2), [ANN, BOB], tape.environment())
    assert result.roles["llm"]["answer"] == pytest.approx(
        {"calls": 1, "prompt_tokens": 700, "completion_tokens": 30}
    )


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
