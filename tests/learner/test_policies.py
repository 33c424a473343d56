"""Schedules, and several policies updated each on its own turns."""

from __future__ import annotations

import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner.gradients import apply
from jax_ragrl.learner.objective import KL
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Turn
from jax_ragrl.learner.policies import (
    Phase,
    Schedule,
    update_all,
    with_kl,
    with_new_references,
    with_phase_rate,
)
from tests.learner.bigram import ROLES, STEERED, deep, named, prepared

TRIO = ("plan", "analysis", "rewrite")
STAGED = Schedule(phases=(Phase(3, ("plan",)), Phase(2, ("analysis", "rewrite"))))
EVERY = Schedule(every=(("plan", 3), ("rewrite", 2)), together=2)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(), ["par"] * 8),
        (STAGED, ["p", "p", "p", "ar", "ar", "ar", "ar", "ar"]),
        (EVERY, ["par", "par", "ar", "pa", "ar", "a", "par", "a"]),
    ],
)
def test_a_schedule_says_which_roles_train_at_a_step(schedule, expected):
    found = ["".join(r[0] for r in schedule.roles(step, TRIO)) for step in range(8)]
    assert found == expected
    assert schedule.updates(8, TRIO, ("plan",)) == sum("p" in step for step in expected)


def test_references_are_refreshed_where_another_phase_begins_and_nowhere_else():
    assert [step for step in range(8) if STAGED.begins_phase(step)] == [3]
    assert not any(s.begins_phase(step) for s in (Schedule(), EVERY) for step in range(8))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Schedule(STAGED.phases, EVERY.every), "give one of them"),
        (lambda: Schedule(every=(("plan", 0),)), "below 1"),
        (lambda: STAGED.roles(0, ("plan", "judge")), "names role 'analysis': use some of plan"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(make, words):
    with pytest.raises(UserError, match=words):
        make()


def two_policies():
    """Two policies of different depth, each of one role."""
    adam = Optimizer(0.1)
    return {"a": prepared(STEERED, adam), "b": prepared(STEERED, adam, deep())}


def turns() -> list[Turn]:
    return [Turn(i, ROLES[i % 2], (1, 2, 3), (4 + i, 5)) for i in range(4)]


def test_each_policy_is_updated_on_the_turns_of_its_trained_roles():
    number_N = np.array([1.0, 1.0, -1.0, -1.0], np.float32)
    policy_of = dict(zip(ROLES, "ab", strict=True))

    def after(roles):
        arguments = (turns(), number_N, {}, random.Random(0))
        return update_all(two_policies(), policy_of, roles, *arguments)

    before = {k: named(m.policy.params) for k, (_, m) in two_policies().items()}

    def moved(policies) -> set[str]:
        now = {k: named(m.policy.params)["embed"] for k, (_, m) in policies.items()}
        return {k for k in now if np.abs(now[k] - before[k]["embed"]).max() > 0}

    both, metrics = after(ROLES)
    assert moved(both) == {"a", "b"}
    assert {name.split("/")[0] for name in metrics} == {"a", "b"}
    first, metrics = after(ROLES[:1])
    assert moved(first) == {"a"}
    assert {name for name in metrics if name.startswith("b")} == {"b/left_out"}
    alone = named(first["a"][1].policy.params)
    for name, x in named(both["a"][1].policy.params).items():
        np.testing.assert_array_equal(x, alone[name])


def test_turns_too_long_for_a_row_are_counted():
    long = [Turn(i, ROLES[0], tuple(range(12)), (i,) * (3 + 2 * i)) for i in range(3)]
    policies = {"a": prepared(STEERED, Optimizer(0.1))}
    arguments = (long, np.ones(3, np.float32), {}, random.Random(0))
    _, metrics = update_all(policies, {ROLES[0]: "a"}, ROLES, *arguments)
    assert metrics["left_out"] == 2  # 17 and 19 tokens in rows of 16


def test_a_refreshed_reference_is_the_policy_in_buffers_of_its_own():
    policies = two_policies()
    arguments = (turns(), np.ones(4, np.float32), {}, random.Random(0))
    policies, _ = update_all(policies, dict(zip(ROLES, "ab", strict=True)), ROLES, *arguments)
    for _, models in with_new_references(policies).values():
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.device_get(models.reference),
            jax.device_get(models.policy.params),
        )
        leaves = (jax.tree.leaves(m) for m in (models.reference, models.policy.params))
        assert not any(a is b for a, b in zip(*leaves, strict=True))


def test_a_refreshed_reference_is_kept_in_the_dtypes_of_the_one_before():
    trainer, before = prepared(STEERED, Optimizer(0.1), deep(), compute="bfloat16")
    _, after = with_new_references({"a": (trainer, before)})["a"]
    for old, new, own in zip(
        *map(jax.tree.leaves, (before.reference, after.reference, before.policy.params)),
        strict=True,
    ):
        assert new.dtype == old.dtype and new is not own
        np.testing.assert_array_equal(*jax.device_get((new, own.astype(old.dtype))))


def test_a_phase_trains_at_its_own_rate_and_without_one_at_the_runs():
    adam = Optimizer(0.1, schedule="constant")
    updates = {"a": 4, "b": 4}

    def step(phase: Phase, name: str) -> float:
        """How far Adam's first step goes on gradients of one."""
        trainer, models = with_phase_rate(two_policies(), phase, adam, updates)[name]
        before = named(models.policy.params)["embed"]
        ones = jax.tree.map(jnp.ones_like, models.policy.params)
        learner, _ = apply(trainer.policy.optimizer, models.policy, ones)
        return float((before - named(learner.params)["embed"]).mean())

    assert step(Phase(1, ROLES), "a") == pytest.approx(0.1, rel=1e-3)
    assert step(Phase(1, ROLES, policy_lr=0.02), "a") == pytest.approx(0.02, rel=1e-3)
    assert step(Phase(1, ROLES, policy_lr=0.02), "b") == pytest.approx(0.02, rel=1e-3)


def test_a_phases_rate_falls_over_all_updates_of_its_policy():
    adam, updates = Optimizer(0.1), {"a": 4, "b": 7}
    phased = with_phase_rate(two_policies(), Phase(2, ROLES, policy_lr=0.02), adam, updates)
    for name, (trainer, _) in phased.items():
        assert trainer.policy.optimizer is adam.transform(0.02, updates[name])


def test_a_policy_without_a_reference_gets_none_with_a_new_phase():
    free = dataclasses.replace(STEERED, kl=KL("none"))
    refreshed = with_new_references({"a": prepared(free, Optimizer(0.1))})
    assert refreshed["a"][1].reference is None


def test_a_phase_has_its_own_kl_coefficient():
    policies = with_kl(two_policies(), 0.04)
    found = [jax.device_get(models.kl_coefficient) for _, models in policies.values()]
    np.testing.assert_allclose(found, 0.04, rtol=1e-6)
