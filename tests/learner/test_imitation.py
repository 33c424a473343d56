from __future__ import annotations

import functools

import jax
import numpy as np
import optax
from flax import nnx

from jax_ragrl.learner import imitation as module
from jax_ragrl.learner.imitation import Example, Packed, imitate, pack, token_losses
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout, Turn
from tests.learner import reference
from tests.learner.bigram import GRPO, named, prepared
from tests.tiny import policy

ADAM = Optimizer(0.1, schedule="constant", max_grad_norm=0.3)


def examples(seed: int = 0, most: int = 250) -> list[Example]:
    draw = np.random.default_rng(seed)
    some = lambda n: tuple(draw.integers(3, most, n).tolist())  # noqa: E731
    return [Example(some(2 + i), some(1 + i % 3), "planner") for i in range(6)]


def test_an_imitated_example_equals_cross_entropy_in_float64():
    trainer, models = prepared(GRPO, ADAM)
    trainer = trainer._replace(layout=Layout((16,), 16))  # several batches, one mean
    made = examples(most=12)
    turns = [Turn(i, e.role, e.prompt, e.target) for i, e in enumerate(made)]
    tokens, params = reference.Tokens.of(turns), named(models.policy.params)
    adam = reference.Adam(ADAM, ADAM.policy_lr, 1)

    def loss(params) -> float:
        return float(-reference.logps(params, tokens, 1.0)[0].mean())

    for _ in range(2):
        expected = loss(params)
        models, metrics = imitate(trainer, models, made)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
        assert metrics["tokens"] == len(tokens.target)
        params = adam.step(params, reference.difference(loss, params))
        for name, x in named(models.policy.params).items():
            np.testing.assert_allclose(x, params[name], atol=2e-4, err_msg=name)


@functools.partial(jax.jit, static_argnums=0)
def losses(graph, params, batch: Packed):
    return token_losses(graph, params, batch)


def test_packed_examples_have_the_losses_of_examples_alone():
    """Prompt tokens weigh a little; every token but an example's first is scored once."""
    made = examples()
    batch, left = pack(made, 3, 32, prompt_weight=0.1)
    assert not left and (batch.segments_RL.max(axis=1) > 1).any()
    packed = jax.device_get(losses(*policy(), jax.device_put(batch)))[0]
    found = sorted(packed[batch.weight_RL[:, 1:] > 0].tolist())
    alone = []
    for example in made:
        one, _ = pack([example], 3, 32, prompt_weight=0.1)
        each = jax.device_get(losses(*policy(), jax.device_put(one)))[0]
        alone += each[one.weight_RL[:, 1:] > 0].tolist()
    assert len(found) == sum(len(e.prompt) + len(e.target) - 1 for e in made)
    np.testing.assert_allclose(found, sorted(alone), atol=1e-5)


def test_targets_weigh_one_prompts_what_they_are_given_and_a_first_token_nothing():
    """Two examples in a row, one for the next batch, and one that no row holds."""
    one, two = Example((1, 2), (3, 4), "planner"), Example((5, 6, 7), (8,), "planner")
    long = Example((9,) * 8, (9,) * 8, "planner")
    batch, left = pack([one, two, one, long], 1, 10, prompt_weight=0.25)
    assert left == [one]
    np.testing.assert_array_equal(batch.ids_RL, [[1, 2, 3, 4, 5, 6, 7, 8, 0, 0]])
    np.testing.assert_array_equal(batch.segments_RL, [[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    np.testing.assert_array_equal(batch.positions_RL, [[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
    np.testing.assert_allclose(batch.weight_RL, [[0, 0.25, 1, 1, 0, 0.25, 0.25, 1, 0, 0]])


def test_a_supervised_step_has_the_loss_of_weights_and_the_accuracy_of_targets(monkeypatch):
    batch, _ = pack(examples(), 3, 32, prompt_weight=0.1)
    weight_RL, rng = batch.weight_RL[:, 1:], np.random.default_rng(0)
    loss_RL = rng.random(weight_RL.shape).astype(np.float32)
    right_RL = rng.random(weight_RL.shape) < 0.5
    found = jax.device_put((loss_RL, right_RL))
    monkeypatch.setattr(module, "token_losses", lambda *_: found)
    (graph, params), rate = policy(), optax.sgd(0.0)
    step = jax.jit(functools.partial(module.sft_step, graph, rate))
    _, _, metrics = jax.device_get(step(params, rate.init(params), jax.device_put(batch)))
    expected = (loss_RL * weight_RL).sum() / weight_RL.sum()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    right = right_RL[weight_RL == 1].mean()
    np.testing.assert_allclose(metrics["token_accuracy"], right, rtol=1e-6)


def test_nothing_to_imitate_changes_nothing():
    trainer, models = prepared(GRPO, ADAM)
    assert imitate(trainer, models, [])[0] is models
    assert isinstance(models.policy.params, nnx.State)
