"""Laws of gradients by role: parts of a whole, without any part in the update."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Turn, group_turns
from jax_ragrl.learner.passes import accumulate
from jax_ragrl.learner.role_gradients import describe, inner_products, role_gradient
from jax_ragrl.learner.state import Policy
from jax_ragrl.learner.update import compute_targets, score_actions, split_minibatches, update
from tests.learner.bigram import GRPO, LAYOUT, PPO, deep, prepared
from tests.learner.test_update import turns

SHARED = dataclasses.replace(PPO, critic="shared")
ONE_STEP = Objective(
    "policy_gradient_loss", critic="none", advantage="group_centred", kl=KL("none")
)


def prepared_update(policy: Policy):
    """Returns the actions and targets of an update."""
    data = split_minibatches(group_turns(turns(), LAYOUT), policy.spec, random.Random(0))
    return data, compute_targets(policy, data, score_actions(policy, data))[0]


def run(policy: Policy, samples: list[Turn] | None = None, *, by_role: bool):
    groups = group_turns(samples or turns(), LAYOUT)
    return update(policy, groups, random.Random(0), by_role=by_role)


def vector(tree) -> np.ndarray:
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(jax.device_get(tree))])


@pytest.mark.parametrize("objective", [PPO, GRPO, SHARED, ONE_STEP])
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
    objective = dataclasses.replace(ONE_STEP, aggregation="role_sum")
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
