"""Direct preference optimisation: pairs of answers after one prompt, of which one is preferred.

A run with a config section `preference` learns from the pairs of its own rollouts: of the actions
tried in one state, the one with the most credit is preferred to the one with the least.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.learner.gradients import (
    Gradient,
    add,
    apply,
    check_finite,
    read,
    score,
    summed,
    zeros,
)
from jax_ragrl.learner.packing import Batch, Group, Rows, Turn, grouped, lay_out
from jax_ragrl.learner.policies import Policies
from jax_ragrl.learner.state import Models, Trainer, scalar
from jax_ragrl.learner.update import warn_of_skipped
from jax_ragrl.losses import dpo_loss
from jax_ragrl.rollout.tree import Forest, decisions
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.runtime.sharding import fetch, on, place, ways
from jax_ragrl.types import Tensor


class Pair(NamedTuple):
    """Two answers of a role to one prompt, as ids."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    role: str


@dataclasses.dataclass(frozen=True)
class Preference:
    """The config section `preference`; of the objective, only a place of the KL is then read.

    `beta` is that of the loss. A pair's credits differ by more than `margin`.
    """

    beta: float = 0.1
    margin: float = 0.0


def pairs_of(
    forest: Forest, credit_N: np.ndarray, roles: Sequence[str], margin: float = 0.0
) -> list[Pair]:
    """The best and the worst action of every decision of `roles`, where they differ enough.

    `credit_N` float32: what each action led to, nan where that is not known: it is in no pair. Of
    equal ones the first is taken.
    """
    pairs = []
    for tried in decisions(forest):
        record = forest.records[tried[0]]
        nodes = [n for n in tried if np.isfinite(credit_N[n])]
        if record.role not in roles or not nodes:
            continue
        best, worst = (pick(nodes, key=lambda n: credit_N[n]) for pick in (max, min))
        if credit_N[best] - credit_N[worst] > margin:
            chosen, rejected = (forest.records[n].action for n in (best, worst))
            assert chosen is not None and rejected is not None
            pairs.append(Pair(chosen.prompt_ids, chosen.ids, rejected.ids, record.role))
    return pairs


def prefer_all(
    policies: Policies,
    policy_of: Mapping[str, str],
    pairs: Sequence[Pair],
    beta: float,
    rng: random.Random,
) -> tuple[dict[str, tuple[Trainer, Models]], dict[str, float]]:
    """Every policy updated on the pairs of its roles, `epochs * minibatches` times.

    Metrics as in `dpo_update`, means over its steps, with `pairs` and `left_out` (too long for a
    row) counted; named `<policy>/...` where there are several policies.
    """
    after, metrics = dict(policies), dict[str, float]()
    for name, (trainer, models) in policies.items():
        own = [pair for pair in pairs if policy_of.get(pair.role) == name]
        fitting = [pair for pair in own if fits(trainer, pair)]
        models, found = _preferred(trainer, models, fitting, beta, rng)
        after[name] = trainer, models
        counts = {"pairs": float(len(fitting)), "left_out": float(len(own) - len(fitting))}
        prefix = f"{name}/" if len(policies) > 1 else ""
        metrics |= {f"{prefix}{key}": value for key, value in (found | counts).items()}
    return after, metrics


def _preferred(
    trainer: Trainer, models: Models, pairs: Sequence[Pair], beta: float, rng: random.Random
) -> tuple[Models, dict[str, float]]:
    """One policy updated on its pairs, in random minibatches; the means of its metrics."""
    seen: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(trainer.optimizer.epochs if pairs else 0):
        mixed = shuffled(rng, pairs)
        count = min(trainer.optimizer.minibatches, len(mixed))
        for i in range(count):
            models, stepped = dpo_update(trainer, models, mixed[i::count], beta=beta)
            for key, value in stepped.items():
                seen[key].append(value)
    metrics = {key: float(np.mean(values)) for key, values in seen.items()}
    if metrics.get("skipped") == 1.0:
        warn_of_skipped()
    return models, metrics


def fits(trainer: Trainer, pair: Pair) -> bool:
    """Whether one row holds a pair, both answers."""
    made = _grouped(trainer, 0, pair)
    return len(made) == 1 and len(made[0].turns) == 2


class Sides(NamedTuple):
    """Of each scored token `[R, M]`: int32 the number of its pair in the row (M on padding), and
    float32 its sign: 1 in a chosen answer, -1 in a rejected one, 0 on padding."""

    pair_RM: Tensor
    sign_RM: Tensor


def dpo_update(
    trainer: Trainer, models: Models, pairs: Sequence[Pair], *, beta: float = 0.1
) -> tuple[Models, dict[str, float]]:
    """One optimizer step on the mean loss of some pairs, against the trainer's reference.

    Metrics: `loss/dpo`, `right` (the share of pairs whose chosen answer gained more), `grad_norm`,
    `skipped`. Raises `UserError` if there is no reference, for a pair longer than a row, and if
    parameters are no longer finite.
    """
    if models.reference is None:
        raise UserError("DPO needs a reference, but objective.kl.where is 'none': name a place")
    batches = lay_out(_groups(trainer, pairs), trainer.roles, trainer.layout, ways(trainer.mesh))
    net, learner = trainer.policy, models.policy
    temperature, share = (scalar(x, trainer.mesh) for x in (trainer.temperature, 1 / len(pairs)))
    sums: list[dict[str, Array]] = []
    with on(trainer.mesh):
        grads = zeros(learner.params, net.layout)
        for rows, sides in place([(b.rows, sides_of(b)) for b in batches], trainer.mesh):
            fixed = (net.graph, models.reference, net.frozen)
            reference = score(*fixed, rows, temperature, trainer.allowed_ZV).logp_RM
            grads, more, _ = preference_gradient(
                *(net.graph, learner.params, net.frozen),
                *(rows, sides, reference, temperature, share),
                allowed_ZV=trainer.allowed_ZV,
                beta=beta,
                layout=net.layout,
                total=grads,
            )
            sums.append(more)
        learner, stepped = apply(net.optimizer, learner, grads)
    found = fetch(functools.reduce(add, sums) | stepped)
    metrics = {name: float(x) for name, x in found.items()}
    check_finite(metrics)
    return models._replace(policy=learner), metrics


def _groups(trainer: Trainer, pairs: Sequence[Pair]) -> list[Group]:
    """A group a pair: node `2 i` is the chosen answer of pair `i`, and `2 i + 1` the rejected."""
    groups = []
    for i, pair in enumerate(pairs):
        if not fits(trainer, pair):
            size = len(pair.prompt) + len(pair.chosen) + len(pair.rejected)
            raise UserError(
                f"pair {i} has {size} tokens, more than a row of {trainer.layout.lengths[-1]}: "
                "leave it out, or raise layout.lengths"
            )
        groups += _grouped(trainer, i, pair)
    return groups


def _grouped(trainer: Trainer, i: int, pair: Pair) -> list[Group]:
    answers = enumerate((pair.chosen, pair.rejected))
    turns = [Turn(2 * i + k, pair.role, pair.prompt, ids) for k, ids in answers]
    return grouped(turns, trainer.layout)


def sides_of(batch: Batch) -> Sides:
    """Whose answer each scored token of a batch of pairs is."""
    shape = batch.rows.mask_RM.shape
    sides = Sides(np.full(shape, shape[1], np.int32), np.zeros(shape, np.float32))
    numbers: dict[int, int] = {}
    counts = [0] * shape[0]
    actions = batch.actions
    owned = (actions.node_A, actions.row_A, actions.first_A, actions.size_A)
    for node, r, first, size in zip(*owned, strict=True):
        pair, rejected = divmod(int(node), 2)
        if pair not in numbers:
            numbers[pair] = counts[r]
            counts[r] += 1
        sides.pair_RM[r, first : first + size] = numbers[pair]
        sides.sign_RM[r, first : first + size] = -1 if rejected else 1
    return sides


@functools.partial(jax.jit, static_argnames=("graph", "beta", "layout"), donate_argnames=("total",))
def preference_gradient(
    graph: Any,
    params: Any,
    frozen: Any,
    rows: Rows,
    sides: Sides,
    ref_logp_RM: Array,
    temperature: Array,
    share: Array,
    allowed_ZV: Array | None = None,
    *,
    beta: float,
    layout: tuple[Any, ...] | None,
    total: Any,
) -> Gradient:
    """The gradient of the pairs' losses, each weighing `share`, and so weighted sums of `loss/dpo`
    and `right`. `allowed_ZV`, `layout` and `total` as in `step.gradient`."""

    def loss_of(params: Any) -> tuple[Array, dict[str, Array]]:
        logp_RM = read(nnx.merge(graph, params, frozen), rows, temperature, allowed_ZV).logp_RM
        assert logp_RM is not None
        answers = [(x, sides.sign_RM == s) for x in (logp_RM, ref_logp_RM) for s in (1.0, -1.0)]
        sums = [_by_pair(jnp.where(own, x, 0.0), sides.pair_RM) for x, own in answers]
        real_RP = _by_pair(jnp.abs(sides.sign_RM), sides.pair_RM) > 0
        loss = share * jnp.sum(dpo_loss(*sums, beta=beta), where=real_RP)
        gained_RP = (sums[0] - sums[2]) - (sums[1] - sums[3])
        right = share * jnp.sum((gained_RP > 0) & real_RP, dtype=jnp.float32)
        return loss, {"loss/dpo": loss, "right": right}

    return Gradient(*summed(loss_of, params, total, layout))


def _by_pair(x_RM: Array, pair_RM: Array) -> Array:
    """Sums over the tokens of each pair of a row, `[R, P]`; padding is dropped."""
    add_up = functools.partial(jax.ops.segment_sum, num_segments=x_RM.shape[1])
    return jax.vmap(add_up)(x_RM, pair_RM)
