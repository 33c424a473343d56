"""Several policies: the roles trained at each step, and each policy updated on its own turns."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jax_ragrl.config.ranges import Count, NotNegative
from jax_ragrl.errors import UserError
from jax_ragrl.learner.optimizer import Optimizer, check_rate
from jax_ragrl.learner.packing import Minibatches, Turn, group_turns, lay_out
from jax_ragrl.learner.state import Policy, scalar
from jax_ragrl.learner.update import score_policy, update
from jax_ragrl.rollout.tree import Text
from jax_ragrl.runtime.sharding import data_parallel_size
from jax_ragrl.text.tokenizer import ChatTokenizer

Policies = Mapping[str, Policy]


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run in which some roles are trained and the others only act.

    Fields:
      steps: length of the phase; the last phase lasts to the end of the run.
      roles: names of the trained roles.
      policy_lr: peak learning rate in this phase; 0: that of the run.
      kl_coefficient: KL coefficient in this phase; 0: that of the run.
    """

    steps: Count
    roles: tuple[str, ...]
    policy_lr: NotNegative = 0.0
    kl_coefficient: NotNegative = 0.0

    def __post_init__(self) -> None:
        check_rate("schedule.phases policy_lr", self.policy_lr)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Selects the roles trained at each step; by default all of them.

    Fields:
      phases: consecutive phases (OPERA: plan, analysis, rewrite).
    """

    phases: tuple[Phase, ...] = ()

    def phase_number(self, step: int) -> int:
        """Returns the number of the phase of a step, from 0; 0 without phases."""
        # The last phase has no end: later steps belong to it.
        ends = list(itertools.accumulate(phase.steps for phase in self.phases))
        return min(bisect.bisect_right(ends, step), max(len(ends) - 1, 0))

    def roles(self, step: int, roles: Sequence[str]) -> tuple[str, ...]:
        """Returns the roles trained at a step (from 0), in the order of `roles`.

        Raises `UserError` if the schedule names a role that is not in `roles`.
        """
        role_names = {role for phase in self.phases for role in phase.roles}
        if unknown := sorted(role_names - set(roles)):
            raise UserError(
                f"schedule names role {unknown[0]!r}, which this system does not train: use some "
                f"of {', '.join(roles)}"
            )
        phase = self.phase(step)
        return tuple(r for r in roles if phase is None or r in phase.roles)

    def phase(self, step: int) -> Phase | None:
        return self.phases[self.phase_number(step)] if self.phases else None

    def begins_phase(self, step: int) -> bool:
        """Whether a new phase begins at a step; references are refreshed before such a step."""
        return step > 0 and self.phase_number(step) != self.phase_number(step - 1)

    def updates(self, steps: int, roles: Sequence[str], own: Sequence[str]) -> int:
        """Counts the first `steps` steps that train a policy with the roles `own`."""
        return sum(bool(set(own) & set(self.roles(step, roles))) for step in range(steps))


def update_all(
    policies: Policies,
    policy_of: Mapping[str, str],
    roles: Sequence[str],
    turns: Sequence[Turn],
    rng: random.Random,
    *,
    is_measured: bool = False,
    by_role: bool = False,
) -> tuple[dict[str, Policy], dict[str, float]]:
    """Updates every policy on the turns of its roles.

    Args:
      policy_of: from role to policy; frozen roles, which are never trained, are not in it.
      roles: the roles trained at this step.
      turns: turns of all roles, with their credit.
      is_measured, by_role: see `update`.

    Returns:
      The policies, and the metrics of `update`, with `dropped_too_long`, the number of turns that
      exceed the longest row. With several policies the names begin with `<policy>/`.
    """
    result, metrics = dict(policies), dict[str, float]()
    for name, policy in policies.items():
        own = [t for t in turns if t.role in roles and policy_of.get(t.role) == name]
        groups = group_turns(own, policy.spec.layout)
        result[name], own_metrics = update(
            policy, groups, rng, is_measured=is_measured, by_role=by_role
        )
        prefix = f"{name}/" if len(policies) > 1 else ""
        count = sum(len(group.turns) for group in groups)
        own_metrics["dropped_too_long"] = float(len(own) - count)
        metrics |= {f"{prefix}{key}": value for key, value in own_metrics.items()}
    return result, metrics


def with_rate(
    policies: Policies, peak: float, optimizer: Optimizer, updates: Mapping[str, int]
) -> dict[str, Policy]:
    """Sets the peak learning rate of all policies; the optimizer states are kept.

    The schedule still decays over the whole run of `updates` by policy.
    """
    # The transformation changes, its state does not: step count and moments continue.
    out = {}
    for name, policy in policies.items():
        model = policy.spec.policy._replace(optimizer=optimizer.transform(peak, updates[name]))
        out[name] = policy._replace(spec=policy.spec._replace(policy=model))
    return out


def with_kl(policies: Policies, coefficient: float) -> dict[str, Policy]:
    return {
        name: policy.with_state(kl_coefficient=scalar(coefficient, policy.spec.mesh))
        for name, policy in policies.items()
    }


def with_new_references(policies: Policies) -> dict[str, Policy]:
    """Makes a copy of each policy its new reference, if it has a reference."""
    result = dict(policies)
    for name, policy in policies.items():
        if (old := policy.state.reference) is not None:
            # `jnp.array` copies: the next update donates the buffers of the policy.
            new = jax.tree.map(lambda x, y: jnp.array(x, y.dtype), policy.state.policy.params, old)
            result[name] = policy.with_state(reference=new)
    return result


def score_texts(
    policies: Policies,
    policy_of: Mapping[str, str],
    tokenizer: ChatTokenizer,
    texts: Sequence[Text],
) -> list[np.ndarray]:
    """Returns the log-probabilities in nats of the tokens of each text after its prompt.

    Float32 `[tokens]`, at the sampling temperature of the policy of its role, whatever the role's
    grammar allows; NaN if prompt and text exceed the longest row. Prompts that begin alike are rows
    of prefix trees, so that the turns of a conversation cost about as much as its last one.

    Raises:
      UserError: a text names no role.
    """
    if unknown := {text.role for text in texts} - policy_of.keys():
        raise UserError(f"a text names role {min(unknown)!r}: use some of {', '.join(policy_of)}")
    turns = []
    for n, (role, prompt, text, opening) in enumerate(texts):
        before = tokenizer.encode_action(opening, after_prompt=True)
        turns.append(Turn(n, role, (*prompt, *before), tuple(tokenizer.encode(text))))
    scores = [np.full(len(turn.ids), np.nan, np.float32) for turn in turns]
    for name, policy in policies.items():
        # A grammar would remove the probability of other texts.
        spec = policy.spec._replace(allowed_ZV=None, grammars=None)
        own = [turn for turn in turns if turn.ids and policy_of[turn.role] == name]
        if groups := group_turns(own, spec.layout):
            devices = data_parallel_size(spec.mesh)
            data = Minibatches([lay_out(groups, spec.roles, spec.layout, devices)])
            logp_AT = score_policy(policy._replace(spec=spec), data)
            rows = zip(data.actions.node_A, data.actions.size_A, logp_AT, strict=True)
            for n, size, logp_T in rows:
                scores[n] = logp_T[:size]
    return scores
