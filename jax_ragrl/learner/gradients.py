"""The train step, pure: read rows, sum gradients of weighted losses, apply them.

Losses never see a model. Aggregation is a weight a token: the caller divides by what it averages
over, so sums over any split of a batch into parts are exact.

A model is a static graph, the parameters that are trained and those that are frozen (the base
below an adapter; empty otherwise).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.learner.logprobs import TokenLoss, score_tokens, token_loss
from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.packing import Rows
from jax_ragrl.learner.targets import KL_ESTIMATORS, Targets
from jax_ragrl.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    dual_clipped_policy_loss,
    policy_gradient_loss,
    value_loss,
)
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.heads import ActorCritic, Critic


class Learner(NamedTuple):
    """One trained model: parameters and optimizer state."""

    params: Any
    opt_state: Any


class Reading(NamedTuple):
    """What a model makes of each scored token, float32 `[R, M]`, 0 on padding.

    Its log-probability, the entropy of its distribution, whether it was the likeliest (bool), and
    the value of the state before it; None where the model has no such head. `loss` is the sum of
    the losses of tokens that were asked for: then it has their gradient, and the rest of what a
    policy says has none.
    """

    logp_RM: Array | None
    entropy_RM: Array | None
    likeliest_RM: Array | None
    value_RM: Array | None
    loss: Array | None = None


def read(
    model: Decoder | Critic | ActorCritic,
    rows: Rows,
    temperature: Array,
    allowed_ZV: Array | None = None,
    loss: TokenLoss | None = None,
    given_RM: Any = None,
) -> Reading:
    """One forward of a policy, a critic, or both on one trunk.

    Hidden states are gathered at the places that predict a scored token before any head is applied.
    `allowed_ZV` (bool) are the tokens that each role's grammar lets it write, as in sampling; None:
    all. `loss` is one of a policy's tokens, see `scoring.token_loss`.
    """
    trunk = model.trunk if isinstance(model, Critic) else _policy(model)
    hidden_RLD, _ = trunk(rows.ids_RL, rows.positions_RL, rows.until_RL)
    hidden_RMD = jax.vmap(lambda hidden_LD, at_M: hidden_LD[at_M])(hidden_RLD, rows.source_RM)
    value_RM = None
    if not isinstance(model, Decoder):
        value_RM = jnp.where(rows.mask_RM, model.head(hidden_RMD), 0.0)
    if isinstance(model, Critic):
        return Reading(None, None, None, value_RM)
    given = (_policy(model), hidden_RMD, rows, temperature, allowed_ZV)
    total = None
    if loss is None:
        found = score_tokens(*given)
    else:
        total, found = token_loss(*given, loss, given_RM)
    logp_RM, entropy_RM = (jnp.where(rows.mask_RM, x, 0.0) for x in found[:2])
    return Reading(logp_RM, entropy_RM, found.likeliest_RM & rows.mask_RM, value_RM, total)


def _policy(model: Decoder | ActorCritic) -> Decoder:
    return model.policy if isinstance(model, ActorCritic) else model


@functools.partial(jax.jit, static_argnames="graph")
def score(
    graph: Any,
    params: Any,
    frozen: Any,
    rows: Rows,
    temperature: Array,
    allowed_ZV: Array | None = None,
) -> Reading:
    """`read` of a split model, at the sampling temperature."""
    return read(nnx.merge(graph, params, frozen), rows, temperature, allowed_ZV)


class Gradient(NamedTuple):
    """A sum of gradients, and the sums of their metrics (see `gradient`); where the policy was not
    scored before, what it says of the tokens as well, for the metrics."""

    grads: Any
    sums: dict[str, Array]
    said: Reading | None = None


_PROGRAM = {"static_argnames": ("graph", "objective", "layout"), "donate_argnames": "total"}


@functools.partial(jax.jit, **_PROGRAM)
def gradient(
    graph: Any,
    params: Any,
    frozen: Any,
    rows: Rows,
    targets: Targets,
    temperature: Array,
    kl_coefficient: Array,
    allowed_ZV: Array | None = None,
    *,
    objective: Objective,
    layout: tuple[Any, ...] | None = None,
    total: Any = None,
) -> Gradient:
    """The gradient of the weighted losses of one batch, added to `total` if given: that is used up.

    `layout` is the sharding of each parameter (`layout_of`), which its gradient gets too: left to
    itself the compiler may give every device a whole one. The sums: `loss/policy` and `loss/value`
    are weighted like the losses; `clipped`, `entropy`, `kl` and `tokens` count tokens.
    """

    def loss_of(params: Any) -> tuple[Array, tuple[dict[str, Array], Reading | None]]:
        model = nnx.merge(graph, params, frozen)
        kl_RM = jnp.broadcast_to(kl_coefficient, rows.mask_RM.shape)
        of_token = functools.partial(_token_loss, objective)
        reading = read(model, rows, temperature, allowed_ZV, of_token, (targets, kl_RM))
        loss, sums, said = jnp.zeros(()), dict[str, Array](), None
        if reading.loss is not None:
            loss, sums = reading.loss, _policy_sums(objective, reading, targets, rows.mask_RM)
            if targets.old_logp is None:
                said = Reading(reading.logp_RM, reading.entropy_RM, None, None)
        if reading.value_RM is not None and targets.returns is not None:
            value = jnp.sum(_value_terms(objective, reading, targets, rows.mask_RM))
            scale = objective.value_coefficient if objective.critic == "shared" else 1.0
            loss, sums = loss + scale * value, sums | {"loss/value": value}
        return loss, (sums, said)

    grads, (sums, said) = summed(loss_of, params, total, layout)
    return Gradient(grads, sums, said)


def summed(
    loss_of: Any, params: Any, total: Any, layout: tuple[Any, ...] | None
) -> tuple[Any, Any]:
    """The gradient of a loss, added to `total` if given, in `layout`; and what goes with it."""
    if total is None:
        grads, beside = jax.grad(loss_of, has_aux=True)(params)
    else:
        grads, beside = _added(loss_of, params, total)
    return laid_out(grads, layout), beside


def _added(loss_of: Any, params: Any, total: Any) -> tuple[Any, Any]:
    """`total` and the gradient of a loss, the same sums to the last bit; and what goes with it.

    The backward pass adds what it finds of a layer to that layer of `total`, in place, so that no
    second tree of all layers is ever there. What is not of a layer may be used twice (a tied
    embedding): it is summed by itself first.
    """
    if not all(x.size for x in jax.tree.leaves(total)):  # a model without layers
        grads, sums = jax.grad(loss_of, has_aux=True)(params)
        return jax.tree.map(jnp.add, total, grads), sums
    pull: Any
    loss, pull, sums = jax.vjp(loss_of, params, has_aux=True)

    def begin(path: Any, x: Array) -> Any:
        return jax.new_ref(x if _of_layers(path) else jnp.zeros_like(x))

    refs = jax.tree_util.tree_map_with_path(begin, total)
    pull.with_refs(refs)(jnp.ones_like(loss))

    def end(path: Any, x: Array, ref: Any) -> Array:
        found: Array = jax.freeze(ref)
        return found if _of_layers(path) else x + jax.lax.optimization_barrier(found)

    return jax.tree_util.tree_map_with_path(end, total, refs), sums


def _of_layers(path: Any) -> bool:
    name = jax.tree_util.keystr(path)
    return "['layers']" in name or "['adapter']" in name


# Not unused: zeros are on the device of the parameters, as the sums are that come after them. Else
# there would be a second program for these.
@functools.partial(jax.jit, static_argnames="layout", keep_unused=True)
def zeros(params: Any, layout: tuple[Any, ...] | None = None) -> Any:
    """The sum of no gradients, laid out as `gradient` lays its own out."""
    return laid_out(jax.tree.map(jnp.zeros_like, params), layout)


def layout_of(params: Any) -> tuple[Any, ...]:
    """The shardings of parameters, hashable."""
    return tuple(x.sharding for x in jax.tree.leaves(params))


def laid_out(tree: Any, layout: tuple[Any, ...] | None) -> Any:
    """A tree inside a jitted function, its leaves sharded as `layout` says, if it says anything."""
    if layout is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    placed = map(jax.lax.with_sharding_constraint, leaves, layout)
    return jax.tree.unflatten(treedef, list(placed))


def _token_loss(
    o: Objective, logp: Array, entropy: Array, mask: Array, given: tuple[Targets, Array]
) -> Array:
    """The weighted loss of each token of a policy, with its KL and entropy terms."""
    t, kl_coefficient = given
    loss = surrogate(o, logp, _old(logp, t), t.advantage, mask)
    if o.kl.where == "loss":
        loss = loss + kl_coefficient * KL_ESTIMATORS[o.kl.estimator](logp, t.ref_logp, mask)
    if o.entropy:
        loss = loss - o.entropy * entropy
    return loss * t.weight


def _old(logp: Array, t: Targets) -> Array:
    return jax.lax.stop_gradient(logp) if t.old_logp is None else t.old_logp


def _policy_sums(o: Objective, reading: Reading, t: Targets, mask_RM: Array) -> dict[str, Array]:
    """What is worth knowing of a policy's tokens."""
    logp_RM, entropy_RM = reading.logp_RM, reading.entropy_RM
    assert logp_RM is not None and entropy_RM is not None
    old_RM = _old(logp_RM, t)
    ratio_RM = jnp.exp(logp_RM - old_RM)
    sums = {
        "loss/policy": jnp.sum(surrogate(o, logp_RM, old_RM, t.advantage, mask_RM) * t.weight),
        "clipped": _count(ratio_RM < 1 - o.eps_low, mask_RM)
        + _count(ratio_RM > 1 + o.eps_high, mask_RM),
        "entropy": jnp.sum(entropy_RM),
        "tokens": _count(mask_RM, mask_RM),
    }
    if o.kl.where == "loss":
        sums["kl"] = jnp.sum(KL_ESTIMATORS[o.kl.estimator](logp_RM, t.ref_logp, mask_RM))
    return sums


def surrogate(o: Objective, logp: Array, old_logp: Array, advantage: Array, mask: Array) -> Array:
    """The policy loss of each token that the objective names."""
    eps = {"eps_low": o.eps_low, "eps_high": o.eps_high}
    if o.ratio == "clip":
        return clipped_policy_loss(logp, old_logp, advantage, mask, **eps)
    if o.ratio == "dual_clip":
        return dual_clipped_policy_loss(logp, old_logp, advantage, mask, **eps, dual=o.dual)
    return policy_gradient_loss(logp, advantage, mask)


def _value_terms(o: Objective, reading: Reading, t: Targets, mask_RM: Array) -> Array:
    value_RM = reading.value_RM
    assert value_RM is not None
    if o.value_loss == "plain":
        loss_RM = value_loss(value_RM, t.returns, mask_RM)
    else:
        loss_RM = clipped_value_loss(value_RM, t.old_value, t.returns, mask_RM, clip=o.value_clip)
    return loss_RM * t.value_weight


def _count(flags_RM: Array, mask_RM: Array) -> Array:
    return jnp.sum(flags_RM & mask_RM, dtype=jnp.float32)


@functools.partial(jax.jit, donate_argnames="total")
def add(total: Any, more: Any) -> Any:
    """The sum of two trees; the first is used up."""
    return jax.tree.map(jnp.add, total, more)


@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames="learner")
def apply(
    optimizer: optax.GradientTransformation, learner: Learner, grads: Any
) -> tuple[Learner, dict[str, Array]]:
    """One optimizer step; a gradient that is not finite changes nothing and is counted.

    Returns the learner, and the metrics `grad_norm`, `skipped` (0 or 1), and `not_finite`: 1 if the
    new parameters are not all finite, which `check_finite` refuses on the host.
    """
    norm = optax.tree.norm(grads)
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
        updates, opt_state = optimizer.update(grads, learner.opt_state, learner.params)
        stepped = Learner(optax.apply_updates(learner.params, updates), opt_state)
    finite = jnp.isfinite(norm)
    kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), stepped, learner)
    broken = 1.0 - all_finite(kept.params)
    return kept, {"grad_norm": norm, "skipped": jnp.where(finite, 0.0, 1.0), "not_finite": broken}


def all_finite(tree: Any) -> Array:
    """Returns 1 if every number of a tree is finite, else 0; float32."""
    flags = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(flags)).astype(jnp.float32)


def check_finite(metrics: dict[str, float]) -> None:
    """Removes the flags `not_finite` of `apply` from fetched metrics.

    Raises:
      UserError: a model's parameters were not finite after a step. They must not be saved: the
        checkpoints before would be rotated out.
    """
    names = {"not_finite": "policy", "value/not_finite": "critic"}
    broken = [model for key, model in names.items() if metrics.pop(key, 0.0)]
    if broken:
        raise UserError(
            f"after an optimizer step parameters of the {' and the '.join(broken)} are NaN or "
            "infinite: training has diverged, and the step is not saved. The newest checkpoint is "
            "from before; start a new run with a lower learning rate, from the beginning or from "
            "the policy that 'ragrl export' makes of that checkpoint"
        )
