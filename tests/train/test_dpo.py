from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jax_ragrl.batch import Turn
from jax_ragrl.errors import UserError
from jax_ragrl.train.dpo import Pair, dpo_update
from jax_ragrl.train.objective import KL
from jax_ragrl.train.optimizer import Optimizer
from tests.train import reference
from tests.train.bigram import GRPO, HEAT, bigram, named, prepared

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


def test_a_step_equals_its_equation_in_float64():
    trainer, models = prepared(GRPO, ADAM)
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


def test_a_pair_longer_than_a_row_and_a_missing_reference_are_refused():
    trainer, models = prepared(GRPO, ADAM)
    with pytest.raises(UserError, match="pair 0 has 21 tokens, more than a row of 16"):
        dpo_update(trainer, models, [Pair((1,), (2,) * 10, (3,) * 10, "planner")])
    trainer, models = prepared(dataclasses.replace(GRPO, kl=KL("none")), ADAM, bigram())
    with pytest.raises(UserError, match="needs a reference"):
        dpo_update(trainer, models, pairs())
