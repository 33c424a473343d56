"""Schedules, and several policies, each updated on its own turns."""

import dataclasses
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.learner.objective import KL
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Turn
from jax_ragrl.learner.policies import Phase, Schedule, update_all, with_kl, with_new_references
from jax_ragrl.training.setup import enter_phase
from tests.learner.bigram import ROLES, STEERED, deep, named, prepared

TRIO = ("plan", "analysis", "rewrite")
STAGED = Schedule(phases=(Phase(3, ("plan",)), Phase(2, ("analysis", "rewrite"))))
EVERY = Schedule(role_periods=(("plan", 3), ("rewrite", 2)))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), ["par"] * 8),
        (STAGED, ["p", "p", "p", "ar", "ar", "ar", "ar", "ar"]),
        (EVERY, ["par", "a", "ar", "pa", "ar", "a", "par", "a"]),
    ],
)
def test_a_schedule_selects_the_roles_of_a_step(schedule, expected):
    actual = ["".join(r[0] for r in schedule.roles(step, TRIO)) for step in range(8)]
    assert actual == expected
    assert schedule.updates(8, TRIO, ("plan",)) == sum("p" in step for step in expected)


def test_references_are_refreshed_only_at_a_new_phase():
    assert [step for step in range(8) if STAGED.begins_phase(step)] == [3]
    assert not any(s.begins_phase(step) for s in (Schedule(), EVERY) for step in range(8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Schedule(STAGED.phases, EVERY.role_periods), "exclude each other"),
        (lambda: build(Schedule, {"role_periods": [["plan", 0]]}), "at least 1"),
        (lambda: STAGED.roles(0, ("plan", "judge")), "names role 'analysis', .* use some of plan"),
    ],
)
def test_an_impossible_schedule_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


def two_policies():
    """Returns two policies of different depth, each with one role."""
    adam = Optimizer(0.1)
    return {"a": prepared(STEERED, adam), "b": prepared(STEERED, adam, deep())}


def turns() -> list[Turn]:
    credit = (1.0, 1.0, -1.0, -1.0)
    return [Turn(i, ROLES[i % 2], (1, 2, 3), (4 + i, 5), credit=credit[i]) for i in range(4)]


def test_each_policy_is_updated_on_the_turns_of_its_trained_roles():
    policy_of = dict(zip(ROLES, "ab", strict=True))

    def after(roles):
        return update_all(two_policies(), policy_of, roles, turns(), random.Random(0))

    before = {k: named(p.state.policy.params) for k, p in two_policies().items()}

    def moved(policies) -> set[str]:
        now = {k: named(p.state.policy.params)["embed"] for k, p in policies.items()}
        return {k for k in now if np.abs(now[k] - before[k]["embed"]).max() > 0}

    both, metrics = after(ROLES)
    assert moved(both) == {"a", "b"}
    assert {name.split("/")[0] for name in metrics} == {"a", "b"}
    first, metrics = after(ROLES[:1])
    assert moved(first) == {"a"}
    assert {name for name in metrics if name.startswith("b")} == {"b/dropped_too_long"}
    alone = named(first["a"].state.policy.params)
    for name, x in named(both["a"].state.policy.params).items():
        np.testing.assert_array_equal(x, alone[name])


def test_turns_too_long_for_a_row_are_counted():
    long = [Turn(i, ROLES[0], tuple(range(12)), (i,) * (3 + 2 * i), credit=1.0) for i in range(3)]
    policies = {"a": prepared(STEERED, Optimizer(0.1))}
    _, metrics = update_all(policies, {ROLES[0]: "a"}, ROLES, long, random.Random(0))
    assert metrics["dropped_too_long"] == 2  # 17 and 19 tokens in rows of 16


def test_a_refreshed_reference_is_a_copy_of_the_policy_in_its_own_dtypes():
    """Without a reference none is added."""
    policy = prepared(STEERED, Optimizer(0.1), deep(), compute="bfloat16")
    before = jax.tree.map(lambda x: x.dtype, policy.state.reference)
    policies, _ = update_all({"a": policy}, {ROLES[0]: "a"}, ROLES, turns(), random.Random(0))
    state = with_new_references(policies)["a"].state
    leaves = map(jax.tree.leaves, (before, state.reference, state.policy.params))
    for dtype, new, own in zip(*leaves, strict=True):
        assert new.dtype == dtype and new is not own
        np.testing.assert_array_equal(*jax.device_get((new, own.astype(dtype))))
    free = prepared(dataclasses.replace(STEERED, kl=KL("none")), Optimizer(0.1))
    assert with_new_references({"a": free})["a"].state.reference is None


def test_a_phase_without_a_rate_uses_the_rate_of_the_run():
    """The rate decays over all updates of the run, whatever the phase."""
    phases = (Phase(1, ROLES[:1], policy_lr=0.02), Phase(2, ROLES))
    job = SimpleNamespace(
        schedule=Schedule(phases),
        optimizer=Optimizer(0.1),
        run=SimpleNamespace(steps=4),
        policy_of=dict(zip(ROLES, "ab", strict=True)),
    )
    for step, rate in ((0, 0.02), (1, 0.1)):
        policies = enter_phase(job, two_policies(), step, first=True)
        for name, updates in (("a", 4), ("b", 3)):
            transform = policies[name].spec.policy.optimizer
            assert transform is job.optimizer.transform(rate, updates)


def test_the_kl_coefficient_of_all_policies_is_set():
    policies = with_kl(two_policies(), 0.04)
    actual = [jax.device_get(policy.state.kl_coefficient) for policy in policies.values()]
    np.testing.assert_allclose(actual, 0.04, rtol=1e-6)
