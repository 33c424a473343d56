"""Direct preference optimization (DPO) on pairs of answers to one prompt, one of them preferred.

A run with a config section `preference` learns from pairs of its rollouts: of the actions
tried in one state, the action with the most credit is preferred to the one with the least.

Source: Rafailov et al. 2023, "Direct Preference Optimization"; the loss is in `losses.preference`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_ragrl.config.ranges import NotNegative, Positive
from jax_ragrl.errors import UserError
from jax_ragrl.learner.gradients import (
    Gradient,
    accumulate_gradient,
    add,
    apply,
    check_finite,
    score,
    token_outputs,
    zeros,
)
from jax_ragrl.learner.logprobs import Allowed
from jax_ragrl.learner.packing import (
    Batch,
    Group,
    Minibatches,
    Rows,
    Turn,
    group_turns,
    lay_out,
)
from jax_ragrl.learner.policies import Policies
from jax_ragrl.learner.state import Policy, PolicySpec, scalar
from jax_ragrl.learner.update import move_metrics, score_policy, warn_all_skipped
from jax_ragrl.losses import dpo_loss
from jax_ragrl.models.split import SplitModel
from jax_ragrl.rollout.tree import Forest, sibling_groups
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.portable_random import shuffled
from jax_ragrl.runtime.sharding import data_parallel_size, mesh_context, shard_batch, to_host
from jax_ragrl.types import Tensor


class Pair(NamedTuple):
    """Two answers of a role to one prompt, as ids."""

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]
    role: str


@dataclasses.dataclass(frozen=True)
class Preference:
    """The config section `preference`; the objective then only selects the credit and the KL.

    Fields:
      beta: inverse temperature of the loss.
      margin: the credits of a pair differ by more than this.
    """

    beta: Positive = 0.1
    margin: NotNegative = 0.0


def pairs_of(
    forest: Forest, turns: Sequence[Turn], roles: Sequence[str], margin: float = 0.0
) -> list[Pair]:
    """Returns the best and the worst action of every decision of some roles.

    Their credits differ by more than `margin`. Actions without a turn (`packing.turns_of`) or with
    a credit that is not finite are in no pair. Of equal credits the first is taken.
    """
    credit = {turn.node: np.float32(turn.credit) for turn in turns if np.isfinite(turn.credit)}
    pairs = []
    for siblings in sibling_groups(forest):
        role = forest.records[siblings[0]].role
        nodes = [node for node in siblings if node in credit]
        if role not in roles or not nodes:
            continue
        best, worst = max(nodes, key=credit.__getitem__), min(nodes, key=credit.__getitem__)
        if credit[best] - credit[worst] > margin:
            chosen, rejected = (forest.records[n].action for n in (best, worst))
            assert chosen is not None and rejected is not None
            pairs.append(Pair(chosen.prompt_ids, chosen.ids, rejected.ids, role))
    return pairs


def prefer_all(
    policies: Policies,
    policy_of: Mapping[str, str],
    pairs: Sequence[Pair],
    beta: float,
    rng: random.Random,
    *,
    is_measured: bool = False,
) -> tuple[dict[str, Policy], dict[str, float]]:
    """Updates every policy on the pairs of its roles, `epochs * minibatches` times.

    Args:
      policy_of: from role to policy; frozen roles are not in it.
      beta: inverse temperature of the loss.
      is_measured: whether `update.move_metrics` are measured.

    Returns:
      The policies, and metrics: means over steps of the metrics of `dpo_update`, and the counts
      `skipped` (steps), `pairs` and `dropped_too_long` (pairs that exceed a row). With several
      policies the names begin with `<policy>/`.
    """
    result, metrics = dict(policies), dict[str, float]()
    for name, policy in policies.items():
        spec, own = policy.spec, [pair for pair in pairs if policy_of.get(pair.role) == name]
        fitting = [pair for pair in own if fits(spec, pair)]
        data = _laid_out(spec, fitting) if is_measured and fitting else None
        before_AT = None if data is None else score_policy(policy, data)
        values: dict[str, list[float]] = collections.defaultdict(list)
        for _ in range(spec.optimizer.epochs if fitting else 0):
            order = shuffled(rng, fitting)
            count = min(spec.optimizer.minibatches, len(order))
            for i in range(count):
                policy, step_metrics = dpo_update(policy, order[i::count], beta=beta)
                for key, value in step_metrics.items():
                    values[key].append(value)
        own_metrics = {key: float(np.mean(x)) for key, x in values.items()}
        if skipped := values.get("skipped"):
            # A mean would hide a single skipped step.
            own_metrics["skipped"] = float(sum(skipped))
            if all(skipped):
                warn_all_skipped()
        if data is not None and before_AT is not None:
            own_metrics |= move_metrics(policy, data, before_AT)
        own_metrics["pairs"] = float(len(fitting))
        own_metrics["dropped_too_long"] = float(len(own) - len(fitting))
        result[name] = policy
        prefix = f"{name}/" if len(policies) > 1 else ""
        metrics |= {f"{prefix}{key}": value for key, value in own_metrics.items()}
    return result, metrics


def fits(spec: PolicySpec, pair: Pair) -> bool:
    groups = _pair_groups(spec, 0, pair)
    return len(groups) == 1 and len(groups[0].turns) == 2


class Sides(NamedTuple):
    """The number of the pair within the row, int32, and the side of each scored token, `[R, M]`.

    The side is 1 in a chosen answer, -1 in a rejected one. On padding the pair is M, the side 0.
    """

    pair_RM: Tensor
    sign_RM: Tensor


def dpo_update(
    policy: Policy, pairs: Sequence[Pair], *, beta: float = 0.1
) -> tuple[Policy, dict[str, float]]:
    """Takes one optimizer step on the mean DPO loss of some pairs.

    The buffers of the trained state are donated; each pair has to fit into a row. The metrics are
    `loss/dpo`, `right` (fraction of pairs whose chosen answer gained more log-probability than the
    rejected one), `grad_norm` and `skipped`. Raises `UserError` without a reference, or if
    parameters are no longer finite.
    """
    spec, state = policy
    if state.reference is None:
        raise UserError(
            "DPO needs a reference, but objective.kl.where is 'none': set it to loss, reward or "
            "terminal"
        )
    # 1. Pack the pairs; both answers of a pair are in one row and share its prompt.
    (batches,) = _laid_out(spec, pairs).parts
    model, train_state = spec.policy, state.policy
    temperature, weight = (scalar(x, spec.mesh) for x in (spec.temperature, 1 / len(pairs)))
    sums: list[dict[str, Array]] = []
    # 2. Accumulate the gradient over batches; each pair has weight 1 / number of pairs.
    with mesh_context(spec.mesh):
        grads = zeros(train_state.params, model.layout)
        reference = model.with_params(state.reference)
        for rows, sides in shard_batch([(b.rows, sides_of(b)) for b in batches], spec.mesh):
            # The reference is scored per batch: scores of all batches are never in memory.
            ref_logp_RM = score(reference, rows, temperature, spec.allowed_ZV).logp_RM
            grads, batch_sums, _ = preference_gradient(
                model.with_params(train_state.params),
                rows,
                sides,
                ref_logp_RM,
                temperature,
                weight,
                spec.allowed_ZV,
                beta=beta,
                layout=model.layout,
                total=grads,
            )
            sums.append(batch_sums)
        # 3. Step.
        train_state, step_metrics = apply(model.optimizer, train_state, grads)
    host = to_host(functools.reduce(add, sums) | step_metrics)
    metrics = {name: float(x) for name, x in host.items()}
    check_finite(metrics)
    return policy.with_state(policy=train_state), metrics


def _laid_out(spec: PolicySpec, pairs: Sequence[Pair]) -> Minibatches:
    groups = [group for i, pair in enumerate(pairs) for group in _pair_groups(spec, i, pair)]
    devices = data_parallel_size(spec.mesh)
    return Minibatches([lay_out(groups, spec.roles, spec.layout, devices, spec.grammars)])


def _pair_groups(spec: PolicySpec, i: int, pair: Pair) -> list[Group]:
    """Returns one group if a pair fits; node `2 i` is its chosen answer, `2 i + 1` the rejected."""
    answers = enumerate((pair.chosen, pair.rejected))
    turns = [Turn(2 * i + k, pair.role, pair.prompt, ids) for k, ids in answers]
    return group_turns(turns, spec.layout)


def sides_of(batch: Batch) -> Sides:
    shape = batch.rows.mask_RM.shape
    sides = Sides(np.full(shape, shape[1], np.int32), np.zeros(shape, np.float32))
    numbers: dict[int, int] = {}
    counts = [0] * shape[0]
    actions = batch.actions
    owners = zip(actions.node_A, actions.row_A, actions.first_A, actions.size_A, strict=True)
    for node, r, first, size in owners:
        pair, rejected = divmod(int(node), 2)
        if pair not in numbers:
            numbers[pair] = counts[r]
            counts[r] += 1
        # Numbers count within a row, so that sums per pair have at most M segments.
        sides.pair_RM[r, first : first + size] = numbers[pair]
        sides.sign_RM[r, first : first + size] = -1 if rejected else 1
    return sides


@in_order
@functools.partial(jax.jit, static_argnames=("beta", "layout"), donate_argnames=("total",))
def preference_gradient(
    model: SplitModel,
    rows: Rows,
    sides: Sides,
    ref_logp_RM: Array,
    temperature: Array,
    weight: Array,
    allowed_ZV: Allowed | None = None,
    *,
    beta: float,
    layout: tuple[Any, ...] | None,
    total: Any,
) -> Gradient:
    """Returns the gradient of the weighted DPO losses of one batch, plus `total`.

    The metric sums are `loss/dpo` and `right`, weighted like the losses.

    Args:
      model, rows, temperature, allowed_ZV, layout, total: as in `gradients.gradient`.
      ref_logp_RM: float32, log-probabilities under the reference.
      weight: float32 scalar, the weight of each pair.
    """

    def weighted_loss(logp_RM: Array) -> tuple[Array, Array]:
        # Chosen and rejected answers under the policy, then under the reference: [R, P] each.
        answers = [(x, sides.sign_RM == s) for x in (logp_RM, ref_logp_RM) for s in (1.0, -1.0)]
        sums = [_by_pair(jnp.where(own, x, 0.0), sides.pair_RM) for x, own in answers]
        # Segments without tokens are not pairs; their loss log 2 must not count.
        real_RP = _by_pair(jnp.abs(sides.sign_RM), sides.pair_RM) > 0
        loss = weight * jnp.sum(dpo_loss(*sums, beta=beta), where=real_RP)
        # The margin without beta; its sign says whether the pair is ordered correctly.
        gained_RP = (sums[0] - sums[2]) - (sums[1] - sums[3])
        return loss, weight * jnp.sum((gained_RP > 0) & real_RP, dtype=jnp.float32)

    # The loss of a pair is no sum over tokens, but its gradient is one: that of the sum of all
    # log-probabilities, each times the derivative of the loss by it.
    def slopes(logps: Callable[[], Array]) -> Array:
        masked_RM = jnp.where(rows.mask_RM, logps(), 0.0)
        return jax.grad(weighted_loss, has_aux=True)(masked_RM)[0]

    def sloped(logp: Array, entropy: Array, mask: Array, slope: Array) -> Array:
        return logp * slope

    def loss_of(params: Any) -> tuple[Array, dict[str, Array]]:
        full_model = dataclasses.replace(model, params=params).merge()
        outputs = token_outputs(full_model, rows, temperature, allowed_ZV, sloped, slopes)
        assert outputs.loss is not None and outputs.logp_RM is not None
        loss, right = weighted_loss(outputs.logp_RM)
        return outputs.loss, {"loss/dpo": loss, "right": right}

    return Gradient(*accumulate_gradient(loss_of, model.params, total, layout))


def _by_pair(x_RM: Array, pair_RM: Array) -> Array:
    """Sums over the tokens of each pair of a row, `[R, P]`; padding is dropped."""
    add_up = functools.partial(jax.ops.segment_sum, num_segments=x_RM.shape[1])
    return jax.vmap(add_up)(x_RM, pair_RM)
