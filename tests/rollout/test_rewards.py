"""A reward is one finite number per answer or node, whoever wrote its function."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.learner.packing import turns_of
from jax_ragrl.rollout.rewards import answer_rewards, leaf_rewards, rewards_of
from jax_ragrl.run.evaluate import evaluate
from jax_ragrl.systems.baselines.standard import direct
from jax_ragrl.text.metrics import METRICS
from tests.rollout.tape import ANN, BOB, Tape, play

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


def test_credit_that_is_not_finite_names_the_question_unless_its_weight_is_zero():
    own = forest()
    credit_N, weight_N = np.full((2, len(own.records)), np.nan, np.float32)
    weight_N[:] = 0
    assert turns_of(own, credit_N, weight_N) == []
    with pytest.raises(UserError, match="credit of role 'router' for question 'q-ann' is nan"):
        turns_of(own, credit_N, weight_N + 1)


def test_a_question_that_failed_needs_no_reward():
    down = {"answer_direct": lambda r: EffectError("down") if "Bob" in str(r.messages) else "Ulm"}
    tape = Tape({"router": ["[No Retrieval]"] * 2}, replies=down)
    assert leaf_rewards(for_bob(None), play(tape, ANN, BOB)).max() == 1.0
