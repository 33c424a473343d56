"""Steps on demonstrations and on preference pairs, against their equations in float64."""

import dataclasses
import functools
import random

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jax_ragrl.errors import UserError
from jax_ragrl.learner import dpo, imitation
from jax_ragrl.learner.dpo import Pair, dpo_update, prefer_all
from jax_ragrl.learner.gradients import TrainState
from jax_ragrl.learner.imitation import Example, PackedRows, imitate, pack, token_losses
from jax_ragrl.learner.objective import KL
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout, Turn
from tests.learner import reference
from tests.learner.bigram import CONFIG, GRPO, HEAT, LAYOUT, bigram, named, prepared
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


def sft_metrics(batch: PackedRows, rate: float) -> dict[str, np.ndarray]:
    (graph, params), sgd = tiny_policy(), optax.sgd(rate)
    step = jax.jit(functools.partial(imitation.sft_step, graph, sgd))
    return jax.device_get(step(TrainState(params, sgd.init(params)), jax.device_put(batch)))[1]


def test_an_sft_step_weighs_losses_and_counts_targets(monkeypatch):
    batch, _ = pack(examples(), 3, 32, prompt_weight=0.1)
    weight_RL, rng = batch.weight_RL[:, 1:], np.random.default_rng(0)
    loss_RL = rng.random(weight_RL.shape).astype(np.float32)
    right_RL = rng.random(weight_RL.shape) < 0.5
    outputs = jax.device_put((loss_RL, right_RL, np.float32(0.0)))
    monkeypatch.setattr(imitation, "token_losses", lambda *_: outputs)
    metrics = sft_metrics(batch, 0.0)
    expected = (loss_RL * weight_RL).sum() / weight_RL.sum()
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    right = right_RL[weight_RL == 1].mean()
    np.testing.assert_allclose(metrics["token_accuracy"], right, rtol=1e-6)


def test_without_examples_nothing_changes():
    policy = prepared(GRPO, ADAM)
    assert imitate(policy, [])[0] is policy
    assert isinstance(policy.state.policy.params, nnx.State)


BETA = 0.5


def pairs() -> list[Pair]:
    """Returns pairs of three prompts; some share rows and tokens."""
    draw = np.random.default_rng(5)
    ids = lambda n: tuple(draw.integers(0, 12, n).tolist())  # noqa: E731
    prompts = [ids(4), ids(3), ids(5)]
    return [Pair(prompts[i % 3], ids(2 + i % 2), ids(1 + i), "planner") for i in range(4)]


def margins(params, ref) -> np.ndarray:
    """Returns the float64 margins: beta times the difference of what both answers gained."""
    answers = [
        Turn(i, "planner", p.prompt, ids)
        for p in pairs()
        for i, ids in enumerate((p.chosen, p.rejected))
    ]
    tokens = reference.Tokens.of(answers)
    gained = reference.logps(params, tokens, HEAT)[0] - reference.logps(ref, tokens, HEAT)[0]
    sums = np.bincount(tokens.turn, gained)
    return BETA * (sums[::2] - sums[1::2])


@pytest.mark.parametrize("tokens", [LAYOUT.tokens_per_device, 1])
def test_a_step_equals_its_equation_in_float64(tokens: int):
    """All pairs in one batch, or each row in a batch of its own.

    The policy differs from its reference: otherwise all margins would be exactly 0 at first, and
    the sign of a margin in float32 would be that of a rounding error.
    """
    policy = prepared(GRPO, ADAM)
    layout = dataclasses.replace(LAYOUT, tokens_per_device=tokens)
    policy = policy._replace(spec=policy.spec._replace(layout=layout))
    other = jax.tree.map(lambda x: jax.numpy.square(x) + x, policy.state.reference)
    policy = policy.with_state(reference=other)
    params, ref = named(policy.state.policy.params), named(other)

    def loss(params) -> float:
        return float(np.log1p(np.exp(-margins(params, ref))).mean())

    first, adam, fractions = loss(params), reference.Adam(ADAM, ADAM.policy_lr, 1), []
    for _ in range(3):
        expected, gained = loss(params), margins(params, ref)
        assert np.abs(gained).min() > 1e-3  # no tie: `right` does not depend on rounding
        fractions.append((gained > 0).mean())
        policy, metrics = dpo_update(policy, pairs(), beta=BETA)
        np.testing.assert_allclose(metrics["loss/dpo"], expected, rtol=1e-4)
        np.testing.assert_allclose(metrics["right"], fractions[-1], rtol=1e-6)
        params = adam.step(params, reference.difference(loss, params))
        for name, x in named(policy.state.policy.params).items():
            np.testing.assert_allclose(x, params[name], atol=2e-4, err_msg=name)
    assert loss(params) < first - 0.2 and 0 < fractions[0] < 1


def test_each_policy_is_updated_on_the_pairs_of_its_roles(monkeypatch):
    """Pairs of two roles, one of them too long for a row, and a pair of a role without a policy."""
    calls = []

    def step(policy, part, *, beta):
        calls.append((policy.spec.temperature, len(part), beta))
        return policy, {"loss/dpo": float(len(calls)), "right": 0.5, "skipped": len(calls) < 3.0}

    monkeypatch.setattr(dpo, "dpo_update", step)
    short, long = Pair((1, 2), (3,), (4,), "planner"), Pair((1,), (2,) * 9, (3,) * 9, "planner")
    samples = [short] * 3 + [long, short._replace(role="executor"), short._replace(role="frozen")]
    two = prepared(GRPO, Optimizer(0.1, epochs=2, minibatches=2))
    hot = two._replace(spec=two.spec._replace(temperature=9.0))
    policies = {"a": two, "b": hot}
    policy_of = {"planner": "a", "executor": "b"}
    _, metrics = prefer_all(policies, policy_of, samples, 0.7, random.Random(0))
    assert calls == [(HEAT, 2, 0.7), (HEAT, 1, 0.7)] * 2 + [(9.0, 1, 0.7)] * 2
    assert (metrics["a/pairs"], metrics["a/dropped_too_long"], metrics["b/pairs"]) == (3, 1, 1)
    assert (metrics["a/loss/dpo"], metrics["b/loss/dpo"]) == (2.5, 5.5)  # means over steps
    assert (metrics["a/skipped"], metrics["b/skipped"]) == (2.0, 0.0)  # numbers of steps


def test_pairs_without_any_step_warn(monkeypatch):
    skip = lambda policy, part, *, beta: (policy, {"loss/dpo": 1.0, "skipped": 1.0})  # noqa: E731
    monkeypatch.setattr(dpo, "dpo_update", skip)
    policies, pair = {"a": prepared(GRPO, ADAM)}, Pair((1, 2), (3,), (4,), "planner")
    with pytest.warns(UserWarning, match="every optimizer step of an update was skipped"):
        prefer_all(policies, {"planner": "a"}, [pair], 0.7, random.Random(0))


def test_under_a_grammar_probabilities_are_over_allowed_tokens():
    pair = Pair((1, 2), (3, 4), (4, 4, 3), "planner")
    allowed_ZV = np.zeros((2, CONFIG.vocab_size), bool)
    allowed_ZV[:, [3, 4]] = True
    policy = prepared(GRPO, ADAM, allowed_ZV=allowed_ZV)
    answers = [Turn(i, "planner", pair.prompt, ids) for i, ids in enumerate(pair[1:3])]
    tokens = reference.Tokens.of(answers)
    tokens = tokens._replace(allowed=allowed_ZV[:1].repeat(len(tokens.turn), axis=0))
    first, expected = named(policy.state.reference), []
    for _ in range(2):
        now = reference.logps(named(policy.state.policy.params), tokens, HEAT)[0]
        gained = np.bincount(tokens.turn, now - reference.logps(first, tokens, HEAT)[0])
        expected.append(np.log1p(np.exp(-BETA * (gained[0] - gained[1]))))
        policy, metrics = dpo_update(policy, [pair], beta=BETA)
        np.testing.assert_allclose(metrics["loss/dpo"], expected[-1], rtol=1e-4)
    assert expected[1] < expected[0] - 0.01


def test_a_missing_reference_is_refused():
    policy = prepared(dataclasses.replace(GRPO, kl=KL("none")), ADAM, bigram())
    with pytest.raises(UserError, match="needs a reference"):
        dpo_update(policy, pairs())
