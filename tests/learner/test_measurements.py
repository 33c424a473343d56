"""Measurements without any part in the update: its move, gradients by role, and its speed."""

import dataclasses
import random
import types

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.learner.dpo import Pair, prefer_all
from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Turn, group_turns
from jax_ragrl.learner.passes import accumulate
from jax_ragrl.learner.role_gradients import describe, inner_products, role_gradient
from jax_ragrl.learner.state import Policy
from jax_ragrl.learner.throughput import peak_flops, speed, update_flops
from jax_ragrl.learner.update import (
    compute_targets,
    score_actions,
    split_minibatches,
    update,
    update_kl,
)
from jax_ragrl.models.config import param_count
from jax_ragrl.models.lora import LoRAConfig, add_lora
from tests.learner import reference
from tests.learner.bigram import (
    DEEP,
    GRPO,
    GRPO_ADAM,
    HEAT,
    LAYOUT,
    PPO,
    PPO_ADAM,
    deep,
    named,
    prepared,
)
from tests.learner.test_update import turns

FREE = Objective("policy_gradient_loss", critic="none", advantage="group_centred", kl=KL("none"))


def logps(policy: Policy, samples: list[Turn]) -> np.ndarray:
    params = named(policy.state.policy.params)
    return reference.logps(params, reference.Tokens.of(samples), HEAT)[0]


def with_sampler(policy: Policy, samples: list[Turn]) -> list[Turn]:
    """Returns the samples as a sampler of the policy writes them: with log-probabilities."""
    own, numbers = logps(policy, samples), reference.Tokens.of(samples).turn
    return [
        turn._replace(behaviour_logps=tuple(own[numbers == i].tolist()))
        for i, turn in enumerate(samples)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "optimizer"),
    [
        (PPO, PPO_ADAM),  # scored before the update
        (GRPO, GRPO_ADAM),
        (FREE, Optimizer(0.1)),  # scored by its only optimizer step
        (FREE, Optimizer(0.1, epochs=2, minibatches=2)),  # never scored as a whole: the sampler's
    ],
)
def test_the_move_is_the_divergence_between_both_policies(objective, optimizer):
    policy = prepared(objective, optimizer)
    samples = with_sampler(policy, turns())
    before = logps(policy, samples)
    groups = group_turns(samples, LAYOUT)
    policy, metrics = update(policy, groups, random.Random(0), is_measured=True)
    d = logps(policy, samples) - before
    kl, numbers = np.exp(d) - 1 - d, reference.Tokens.of(samples).turn
    assert kl.mean() > 0.01 and kl.max() < 10
    np.testing.assert_allclose(metrics["update_kl/mean"], kl.mean(), rtol=1e-3)
    for role in ("planner", "executor"):
        own = np.array([samples[i].role == role for i in numbers])
        np.testing.assert_allclose(metrics[f"update_kl/{role}"], kl[own].mean(), rtol=1e-3)


@pytest.mark.parametrize(("objective", "optimizer"), [(PPO, PPO_ADAM), (GRPO, GRPO_ADAM)])
def test_measurements_have_no_part_in_the_update_and_no_own_programs(objective, optimizer, caplog):
    """The program that scores the reference scores the policy, and that of the update each role."""
    # No other test's program.
    objective, results = dataclasses.replace(objective, entropy_coefficient=0.07), []
    for is_measured in (False, True):
        policy, groups = prepared(objective, optimizer), group_turns(turns(), LAYOUT)
        measures = {"is_measured": is_measured, "by_role": is_measured}
        caplog.clear()
        with jax.log_compiles():
            policy, metrics = update(policy, groups, random.Random(0), **measures)
        own = {key for key in metrics if key.startswith(("update_kl/", "role_gradient/"))}
        # A mean and two roles; two norms, two shares and a cosine.
        assert len(own) == (3 + 5 if is_measured else 0)
        results.append((policy.state, {k: x for k, x in metrics.items() if k not in own}))
    assert not [f for f in ("score", "gradient") if f"compilation of jit({f})" in caplog.text]
    (state, metrics), (expected, expected_metrics) = results
    assert metrics == expected_metrics
    jax.tree.map(np.testing.assert_array_equal, state, expected)


def test_the_move_of_preference_pairs_is_measured_and_decided_by_no_single_token():
    pairs = [Pair((1, 2), (3, 4), (4, 4, 3), "planner"), Pair((5, 1), (2,), (6, 7), "planner")]
    samples = [
        Turn(i, "planner", pair.prompt, ids)
        for i, pair in enumerate(pairs)
        for ids in (pair.chosen, pair.rejected)
    ]
    policy = prepared(GRPO, Optimizer(0.1, epochs=2, minibatches=2))
    before = logps(policy, samples)
    policies, metrics = prefer_all(
        {"a": policy}, {"planner": "a"}, pairs, 0.5, random.Random(0), is_measured=True
    )
    d = logps(policies["a"], samples) - before
    assert np.abs(d).max() > 0.1
    np.testing.assert_allclose(metrics["update_kl/mean"], (np.exp(d) - 1 - d).mean(), rtol=1e-3)
    _, metrics = prefer_all(
        {"a": policies["a"]}, {}, pairs, 0.5, random.Random(0), is_measured=True
    )
    assert "update_kl/mean" not in metrics, "without pairs nothing moves"
    before, after = np.float32([-0.1, -99.0, -1.0]), np.float32([-99.0, -0.1, -1.0])
    np.testing.assert_array_equal(update_kl(before, after), np.float32([10, 10, 0]))


SHARED = dataclasses.replace(PPO, critic="shared")


def prepared_update(policy: Policy):
    data = split_minibatches(group_turns(turns(), LAYOUT), policy.spec, random.Random(0))
    return data, compute_targets(policy, data, score_actions(policy, data))[0]


def run(policy: Policy, samples: list[Turn] | None = None, *, by_role: bool):
    groups = group_turns(samples or turns(), LAYOUT)
    return update(policy, groups, random.Random(0), by_role=by_role)


def vector(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(tree))])


@pytest.mark.slow
@pytest.mark.parametrize("objective", [PPO, GRPO, SHARED, FREE])
def test_the_gradients_of_the_roles_sum_to_the_whole_gradient(objective):
    policy = prepared(objective, Optimizer(0.1, 0.1, minibatches=2), deep())
    data, targets = prepared_update(policy)
    parts = [vector(role_gradient(policy, data, targets, z)) for z in range(2)]
    spec, params = policy.spec.policy, policy.state.policy.params
    pairs = zip(data.parts, targets, strict=True)
    by_part = [vector(accumulate(policy, spec, params, *pair)[0]) for pair in pairs]
    whole = np.mean(by_part, axis=0)
    assert len(by_part) == 2 and min(map(np.linalg.norm, parts)) > 1e-3
    np.testing.assert_allclose(sum(parts), whole, atol=2e-6 * np.linalg.norm(whole))


def test_a_role_has_the_gradient_of_its_own_tokens_alone():
    """With a sum over roles, the turns of another role change nothing."""
    objective = dataclasses.replace(FREE, aggregation="role_sum")
    policy = prepared(objective, Optimizer(0.1))
    data, targets = prepared_update(policy)
    part = vector(role_gradient(policy, data, targets, 1))
    own = [turn for turn in turns() if turn.role == "executor"]
    copy = policy._replace(state=jax.tree.map(jax.numpy.copy, policy.state))
    alone = run(copy, own, by_role=False)[1]
    np.testing.assert_allclose(np.linalg.norm(part), alone["grad_norm"], rtol=1e-5)


def test_inner_products_give_norms_shares_and_cosines_unless_undefined():
    trees = [{"a": np.float32([3, 0]), "b": np.float32([[4]])}, {"a": np.float32([0, 2]), "b": 0}]
    trees[1]["b"] = np.float32([[-1]])
    products = inner_products(jax.device_put(trees))
    np.testing.assert_allclose(products, [[25, -4], [-4, 5]])
    metrics = describe(["one", "two"], products)
    assert metrics["role_gradient/norm/one"] == 5
    np.testing.assert_allclose(metrics["role_gradient/share/one"], 21 / 22)
    np.testing.assert_allclose(metrics["role_gradient/share/two"], 1 / 22)
    np.testing.assert_allclose(metrics["role_gradient/cosine/one/two"], -4 / np.sqrt(125))
    zero = describe(["one", "two"], np.zeros((2, 2)))
    assert zero == {"role_gradient/norm/one": 0.0, "role_gradient/norm/two": 0.0}
    half = describe(["one", "two"], np.diag([4.0, 0.0]))
    assert half["role_gradient/share/one"] == 1 and "role_gradient/cosine/one/two" not in half


def test_mfu_covers_all_policies_and_devices_and_the_longest_name_gives_the_peak(monkeypatch):
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("TPU v5p") == 459e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12 and peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("cpu") is None
    assert speed({"flops": 1e12}, 100, 10.0, on_mesh=False) == {"tokens_per_sec": 10.0}
    h200 = types.SimpleNamespace(device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [h200])
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    metrics = {"plan/flops": 989e12, "analysis/flops": 2 * 989e12, "plan/kl/mean": 7.0}
    one = speed(metrics, 100, 10.0, on_mesh=False)
    assert one == {"tokens_per_sec": 10.0, "mfu": pytest.approx(0.3)}
    assert speed(metrics, 100, 10.0, on_mesh=True)["mfu"] == pytest.approx(0.3 / 4)


def test_frozen_weights_below_an_adapter_have_no_gradient():
    """Four operations per weight of the base and six per weight of the adapter, in both models."""
    decoder = add_lora(deep(), LoRAConfig(2, targets=("up_proj",)), rngs=nnx.Rngs(0))
    policy = prepared(PPO, dataclasses.replace(PPO_ADAM, epochs=3), decoder)
    width, base = DEEP.hidden_size, param_count(DEEP)
    adapter = 2 * (width + DEEP.intermediate_size)  # A and B of one layer
    head, value = DEEP.vocab_size * width, width + 1  # the critic has a value head instead
    actor, critic = 6 * adapter + 4 * base, 6 * (adapter + value) + 4 * (base - head)
    assert update_flops(policy, 10) == 3 * 10 * (actor + critic)
