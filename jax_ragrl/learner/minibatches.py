"""Splits the groups of an update into minibatches, without the groups that have no gradient."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.packing import Group, Minibatches, lay_out
from jax_ragrl.learner.state import PolicySpec
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.runtime.sharding import data_parallel_size


def split_minibatches(groups: Sequence[Group], spec: PolicySpec, rng: random.Random) -> Minibatches:
    """Splits groups at random into minibatches, each packed into batches of rows.

    With `objective.skip_zero_advantage`, groups whose credits are all 0 are left out, and the
    weights of the others (`Minibatches.share_PZ`) are those that they have among all groups.

    Args:
      groups: groups of turns; there are no more minibatches than groups.
      spec: minibatch count, roles, batch shapes and mesh.
      rng: shuffles the groups.
    """
    order = shuffled(rng, groups)
    # Minibatches consist of whole groups: siblings share their prompt in a row.
    count = min(spec.optimizer.minibatches, len(order))
    parts = [order[i::count] for i in range(count)]
    objective, roles, devices = spec.objective, spec.roles, data_parallel_size(spec.mesh)
    # After the split, so that every group is in the minibatch that it would be in without this.
    kept = [with_gradient(part) for part in parts] if objective.skip_zero_advantage else parts
    share_PZ = [trained_share(objective, roles, *pair) for pair in zip(kept, parts, strict=True)]
    return Minibatches(
        [lay_out(part, roles, spec.layout, devices, spec.grammars) for part in kept],
        share_PZ=np.stack(share_PZ),
        skipped_tokens=_tokens(parts) - _tokens(kept),
    )


def with_gradient(groups: Sequence[Group]) -> list[Group]:
    """Returns the groups with a credit other than 0; the first group if there is none.

    A minibatch is never empty, because the optimizer steps without a gradient too (momentum).
    """
    kept = [group for group in groups if any(turn.credit for turn in group.turns)]
    return kept or list(groups[:1])


def trained_share(
    objective: Objective, roles: Sequence[str], kept: Sequence[Group], part: Sequence[Group]
) -> np.ndarray:
    """Returns the share of the aggregation's denominator that `kept` holds, by role, float32 `[Z]`.

    Args:
      objective: its aggregation says what the denominator counts: tokens or actions, of all roles
        or of each.
      roles: names of all roles.
      kept: the groups that are trained.
      part: all groups of the minibatch.
    """
    # The loss of the groups that are left out is 0, but they count in the mean.
    kept_Z, all_Z = (_denominators(objective, roles, groups) for groups in (kept, part))
    return (kept_Z / np.maximum(all_Z, 1)).astype(np.float32)


def _tokens(parts: Sequence[Sequence[Group]]) -> int:
    return sum(group.tokens for part in parts for group in part)


def _denominators(
    objective: Objective, roles: Sequence[str], groups: Sequence[Group]
) -> np.ndarray:
    """The denominator of the aggregation of each role, float64 `[Z]`."""
    count_Z = np.zeros(len(roles))
    for group in groups:
        for turn in group.turns:
            size = len(turn.ids)
            count_Z[roles.index(turn.role)] += (
                min(size, 1) if objective.aggregation == "sequence_mean" else size
            )
    return count_Z if objective.aggregation == "role_sum" else np.full_like(count_Z, count_Z.sum())
