"""Supervised steps: losses, packing, and equality with cross-entropy in float64."""

import functools

import jax
import numpy as np
import optax
from flax import nnx

from jax_ragrl.learner import imitation
from jax_ragrl.learner.gradients import TrainState
from jax_ragrl.learner.imitation import Example, PackedRows, imitate, pack, token_losses
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout, Turn
from tests.learner import reference
from tests.learner.bigram import GRPO, named, prepared
from tests.tiny import policy as tiny_policy

ADAM = Optimizer(0.1, schedule="constant", max_grad_norm=0.3)


def examples(seed: int = 0, most: int = 250) -> list[Example]:
    draw = np.random.default_rng(seed)
    ids = lambda n: tuple(draw.integers(3, most, n).tolist())  # noqa: E731
    return [Example(ids(2 + i), ids(1 + i % 3), "planner") for i in range(6)]


def test_an_imitated_example_equals_cross_entropy_in_float64():
    policy = prepared(GRPO, ADAM)
    layout = Layout((16,), 16)  # several batches, one mean
    policy = policy._replace(spec=policy.spec._replace(layout=layout))
    samples = examples(most=12)
    turns = [Turn(i, e.role, e.prompt, e.target) for i, e in enumerate(samples)]
    tokens, params = reference.Tokens.of(turns), named(policy.state.policy.params)
    adam = reference.Adam(ADAM, ADAM.policy_lr, 1)

    def loss(params) -> float:
        return float(-reference.logps(params, tokens, 1.0)[0].mean())

    for _ in range(2):
        expected = loss(params)
        policy, metrics = imitate(policy, samples)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
        assert metrics["tokens"] == len(tokens.target)
        params = adam.step(params, reference.difference(loss, params))
        for name, x in named(policy.state.policy.params).items():
            np.testing.assert_allclose(x, params[name], atol=2e-4, err_msg=name)


@functools.partial(jax.jit, static_argnums=0)
def losses(graph, params, batch: PackedRows):
    return token_losses(graph, params, batch)


def test_packing_changes_no_token_loss():
    """Prompt tokens have a small weight; every token except each first one is scored once."""
    samples = examples()
    batch, rest = pack(samples, 3, 32, prompt_weight=0.1)
    assert not rest and (batch.segments_RL.max(axis=1) > 1).any()
    packed = jax.device_get(losses(*tiny_policy(), jax.device_put(batch)))[0]
    actual = sorted(packed[batch.weight_RL[:, 1:] > 0].tolist())
    alone = []
    for example in samples:
        one, _ = pack([example], 3, 32, prompt_weight=0.1)
        each = jax.device_get(losses(*tiny_policy(), jax.device_put(one)))[0]
        alone += each[one.weight_RL[:, 1:] > 0].tolist()
    assert len(actual) == sum(len(e.prompt) + len(e.target) - 1 for e in samples)
    np.testing.assert_allclose(actual, sorted(alone), atol=1e-5)


def test_targets_prompts_and_first_tokens_have_their_weights():
    """Two examples in a row, one for the next batch, and one longer than a row."""
    one, two = Example((1, 2), (3, 4), "planner"), Example((5, 6, 7), (8,), "planner")
    long = Example((9,) * 8, (9,) * 8, "planner")
    batch, rest = pack([one, two, one, long], 1, 10, prompt_weight=0.25)
    assert rest == [one]
    np.testing.assert_array_equal(batch.ids_RL, [[1, 2, 3, 4, 5, 6, 7, 8, 0, 0]])
    np.testing.assert_array_equal(batch.segments_RL, [[1, 1, 1, 1, 2, 2, 2, 2, 0, 0]])
    np.testing.assert_array_equal(batch.positions_RL, [[0, 1, 2, 3, 0, 1, 2, 3, 0, 0]])
    np.testing.assert_allclose(batch.weight_RL, [[0, 0.25, 1, 1, 0, 0.25, 0.25, 1, 0, 0]])


def test_an_sft_step_weighs_losses_and_counts_targets(monkeypatch):
    batch, _ = pack(examples(), 3, 32, prompt_weight=0.1)
    weight_RL, rng = batch.weight_RL[:, 1:], np.random.default_rng(0)
    loss_RL = rng.random(weight_RL.shape).astype(np.float32)
    right_RL = rng.random(weight_RL.shape) < 0.5
    outputs = jax.device_put((loss_RL, right_RL, np.float32(0.0)))
    monkeypatch.setattr(imitation, "token_losses", lambda *_: outputs)
    (graph, params), sgd = tiny_policy(), optax.sgd(0.0)
    step = jax.jit(functools.partial(imitation.sft_step, graph, sgd))
    state = TrainState(params, sgd.init(params))
    _, metrics = jax.device_get(step(state, jax.device_put(batch)))
    expected = (loss_RL * weight_RL).sum() / weight_RL.sum()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    right = right_RL[weight_RL == 1].mean()
    np.testing.assert_allclose(metrics["token_accuracy"], right, rtol=1e-6)


def test_an_sft_step_flags_non_finite_parameters():
    """The gradient is finite; an infinite learning rate makes the parameters infinite."""
    batch, _ = pack(examples(), 3, 32)
    (graph, params), sgd = tiny_policy(), optax.sgd(float("inf"))
    state = TrainState(params, sgd.init(params))
    step = jax.jit(functools.partial(imitation.sft_step, graph, sgd))
    _, metrics = jax.device_get(step(state, jax.device_put(batch)))
    assert (metrics["skipped"], metrics["not_finite"]) == (0.0, 1.0)


def test_without_examples_nothing_changes():
    policy = prepared(GRPO, ADAM)
    assert imitate(policy, [])[0] is policy
    assert isinstance(policy.state.policy.params, nnx.State)
