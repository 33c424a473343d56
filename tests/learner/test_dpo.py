from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner import dpo as module
from jax_ragrl.learner.dpo import Pair, dpo_update, prefer_all
from jax_ragrl.learner.objective import KL
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Turn
from tests.learner import reference
from tests.learner.bigram import CONFIG, GRPO, HEAT, LAYOUT, bigram, named, prepared

ADAM = Optimizer(0.1, schedule="constant", max_grad_norm=0.3)
BETA = 0.5


def pairs() -> list[Pair]:
    """Two pairs of one prompt and pairs of others: several share rows, and tokens."""
    draw = np.random.default_rng(5)
    some = lambda n: tuple(draw.integers(0, 12, n).tolist())  # noqa: E731
    prompts = [some(4), some(3), some(5)]
    return [Pair(prompts[i % 3], some(2 + i % 2), some(1 + i), "planner") for i in range(4)]


def margins(params, ref) -> np.ndarray:
    """beta times how much more each chosen answer gained, in float64."""
    answers = [
        Turn(i, "planner", p.prompt, ids)
        for p in pairs()
        for i, ids in enumerate((p.chosen, p.rejected))
    ]
    tokens = reference.Tokens.of(answers)
    gained = reference.logps(params, tokens, HEAT)[0] - reference.logps(ref, tokens, HEAT)[0]
    sums = np.bincount(tokens.turn, gained)
    return BETA * (sums[::2] - sums[1::2])


@pytest.mark.parametrize("tokens", [LAYOUT.tokens, 1])
def test_a_step_equals_its_equation_in_float64(tokens: int):
    """All pairs in a batch, or a row in each."""
    trainer, models = prepared(GRPO, ADAM)
    trainer = trainer._replace(layout=dataclasses.replace(LAYOUT, tokens=tokens))
    start = named(models.policy.params)

    def loss(params) -> float:
        return float(np.log1p(np.exp(-margins(params, start))).mean())

    params, adam = start, reference.Adam(ADAM, ADAM.policy_lr, 1)
    for _ in range(3):
        expected = loss(params)
        right = (margins(params, start) > 0).mean()
        models, metrics = dpo_update(trainer, models, pairs(), beta=BETA)
        np.testing.assert_allclose(metrics["loss/dpo"], expected, rtol=1e-4)
        np.testing.assert_allclose(metrics["right"], right, rtol=1e-6)
        params = adam.step(params, reference.difference(loss, params))
        for name, x in named(models.policy.params).items():
            np.testing.assert_allclose(x, params[name], atol=2e-4, err_msg=name)
    assert loss(params) < np.log(2) - 0.2


def test_each_policy_prefers_among_the_pairs_of_its_roles_epochs_times_minibatches(monkeypatch):
    """Six pairs of two roles, one of them too long for a row, and a role that is not trained."""
    asked = []

    def step(trainer, models, part, *, beta):
        asked.append((trainer.temperature, len(part), beta))
        return models, {"loss/dpo": float(len(asked)), "right": 0.5}

    monkeypatch.setattr(module, "dpo_update", step)
    short, long = Pair((1, 2), (3,), (4,), "planner"), Pair((1,), (2,) * 9, (3,) * 9, "planner")
    made = [short] * 3 + [long, short._replace(role="executor"), short._replace(role="frozen")]
    two = prepared(GRPO, Optimizer(0.1, epochs=2, minibatches=2))
    policies = {"a": two, "b": (two[0]._replace(temperature=9.0), two[1])}
    policy_of = {"planner": "a", "executor": "b"}
    _, metrics = prefer_all(policies, policy_of, made, 0.7, random.Random(0))
    assert asked == [(HEAT, 2, 0.7), (HEAT, 1, 0.7)] * 2 + [(9.0, 1, 0.7)] * 2
    assert (metrics["a/pairs"], metrics["a/left_out"], metrics["b/pairs"]) == (3, 1, 1)
    assert (metrics["a/loss/dpo"], metrics["b/loss/dpo"]) == (2.5, 5.5)  # means of their steps


def test_a_preference_under_a_grammar_is_of_probabilities_over_what_it_allows():
    pair = Pair((1, 2), (3, 4), (4, 4, 3), "planner")
    allowed_ZV = np.zeros((2, CONFIG.vocab_size), bool)
    allowed_ZV[:, [3, 4]] = True
    trainer, models = prepared(GRPO, ADAM, allowed_ZV=allowed_ZV)
    answers = [Turn(i, "planner", pair.prompt, ids) for i, ids in enumerate(pair[1:3])]
    tokens = reference.Tokens.of(answers)
    tokens = tokens._replace(allowed=allowed_ZV[:1].repeat(len(tokens.turn), axis=0))
    first, expected = named(models.reference), []
    for _ in range(2):
        now = reference.logps(named(models.policy.params), tokens, HEAT)[0]
        gained = np.bincount(tokens.turn, now - reference.logps(first, tokens, HEAT)[0])
        expected.append(np.log1p(np.exp(-BETA * (gained[0] - gained[1]))))
        models, metrics = dpo_update(trainer, models, [pair], beta=BETA)
        np.testing.assert_allclose(metrics["loss/dpo"], expected[-1], rtol=1e-4)
    assert expected[1] < expected[0] - 0.01


def test_a_pair_longer_than_a_row_and_a_missing_reference_are_refused():
    trainer, models = prepared(GRPO, ADAM)
    with pytest.raises(UserError, match="pair 0 has 21 tokens, more than a row of 16"):
        dpo_update(trainer, models, [Pair((1,), (2,) * 10, (3,) * 10, "planner")])
    trainer, models = prepared(dataclasses.replace(GRPO, kl=KL("none")), ADAM, bigram())
    with pytest.raises(UserError, match="needs a reference"):
        dpo_update(trainer, models, pairs())
