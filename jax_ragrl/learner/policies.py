"""Several policies: which roles are trained at a step, and each policy updated on its own turns."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_ragrl.errors import UserError
from jax_ragrl.learner.optimizer import Optimizer, check_rate
from jax_ragrl.learner.packing import Turn, grouped
from jax_ragrl.learner.state import Models, Trainer, scalar
from jax_ragrl.learner.update import update

Policies = Mapping[str, tuple[Trainer, Models]]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of a run in which some roles are trained and the others only act.

    `policy_lr` and `kl` are its peak learning rate and KL coefficient; 0: those of the run.
    """

    steps: int
    roles: tuple[str, ...]
    policy_lr: float = 0.0
    kl: float = 0.0

    def __post_init__(self) -> None:
        check_rate("schedule.phases policy_lr", self.policy_lr)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which roles are trained when: all at every step, unless one of these says otherwise.

    Fields:
      phases: one after another, the last to the end of the run (OPERA: plan, analysis, rewrite).
      every: pairs of role and period: the role is trained at each step that its period divides
        (MMOA-RAG's ablations). A role that is not named is trained at every step.
      together: so many first steps train all roles, whatever `every` says.
    """

    phases: tuple[Phase, ...] = ()
    every: tuple[tuple[str, int], ...] = ()
    together: int = 0

    def __post_init__(self) -> None:
        if self.phases and self.every:
            raise UserError("schedule has phases and every: give one of them")
        if any(phase.steps < 1 for phase in self.phases) or any(n < 1 for _, n in self.every):
            raise UserError("schedule has a phase or a period below 1: leave it out instead")

    def number(self, step: int) -> int:
        """The number of the phase of a step; 0 without phases."""
        ends = list(itertools.accumulate(phase.steps for phase in self.phases))
        return min(bisect.bisect_right(ends, step), max(len(ends) - 1, 0))

    def roles(self, step: int, roles: Sequence[str]) -> tuple[str, ...]:
        """The roles trained at a step (from 0), in the order of `roles`.

        Raises `UserError` where the schedule names a role that is not among them.
        """
        named = {role for phase in self.phases for role in phase.roles} | {r for r, _ in self.every}
        if unknown := sorted(named - set(roles)):
            raise UserError(f"schedule names role {unknown[0]!r}: use some of {', '.join(roles)}")
        if self.phases:
            return tuple(r for r in roles if r in self.phases[self.number(step)].roles)
        period = dict(self.every)
        early = step < self.together
        return tuple(r for r in roles if early or step % period.get(r, 1) == 0)

    def phase(self, step: int) -> Phase | None:
        """The phase of a step; None without phases."""
        return self.phases[self.number(step)] if self.phases else None

    def begins_phase(self, step: int) -> bool:
        """Whether another phase begins with a step: references are refreshed before it."""
        return step > 0 and self.number(step) != self.number(step - 1)

    def updates(self, steps: int, roles: Sequence[str], own: Sequence[str]) -> int:
        """In how many of `steps` some role of `own`, a policy's, is trained."""
        return sum(bool(set(own) & set(self.roles(step, roles))) for step in range(steps))


def update_all(
    policies: Policies,
    policy_of: Mapping[str, str],
    roles: Sequence[str],
    turns: Sequence[Turn],
    number_N: np.ndarray,
    sampled: Mapping[int, Sequence[float]],
    rng: random.Random,
) -> tuple[dict[str, tuple[Trainer, Models]], dict[str, float]]:
    """Every policy updated on the turns of its roles, among the `roles` trained at this step.

    `policy_of` maps roles to policies; a role of none (a frozen one) is never trained. Metrics are
    named `<policy>/...` where there are several policies; `left_out` counts turns too long for a
    row. The other arguments are as in `update`.
    """
    after, metrics = dict(policies), dict[str, float]()
    for name, (trainer, models) in policies.items():
        own = [t for t in turns if t.role in roles and policy_of.get(t.role) == name]
        groups = grouped(own, trainer.layout)
        models, seen = update(trainer, models, groups, number_N, sampled, rng)
        after[name] = trainer, models
        prefix = f"{name}/" if len(policies) > 1 else ""
        seen["left_out"] = float(len(own) - sum(len(group.turns) for group in groups))
        metrics |= {f"{prefix}{key}": value for key, value in seen.items()}
    return after, metrics


def with_phase_rate(
    policies: Policies, phase: Phase, optimizer: Optimizer, updates: Mapping[str, int]
) -> dict[str, tuple[Trainer, Models]]:
    """The policies at a phase's learning rate; `updates` are those of each in the whole run.

    The optimizer's state goes on: a schedule falls over the whole run, from a peak a phase.
    """
    peak = phase.policy_lr or optimizer.policy_lr
    return {
        name: (_at_rate(trainer, optimizer.transform(peak, updates[name])), models)
        for name, (trainer, models) in policies.items()
    }


def _at_rate(trainer: Trainer, transform: optax.GradientTransformation) -> Trainer:
    return trainer._replace(policy=trainer.policy._replace(optimizer=transform))


def with_kl(policies: Policies, coefficient: float) -> dict[str, tuple[Trainer, Models]]:
    """The policies with another KL coefficient."""
    return {
        name: (trainer, models._replace(kl_coefficient=scalar(coefficient, trainer.mesh)))
        for name, (trainer, models) in policies.items()
    }


def with_new_references(policies: Policies) -> dict[str, tuple[Trainer, Models]]:
    """The policies, each with itself as it is now for a reference where it has one."""
    return {
        name: (trainer, _with_new_reference(models)) for name, (trainer, models) in policies.items()
    }


def _with_new_reference(models: Models) -> Models:
    if models.reference is None:
        return models
    kept = jax.tree.map(
        lambda x, old: jnp.array(x, old.dtype), models.policy.params, models.reference
    )
    return models._replace(reference=kept)
