"""The pure train step: model outputs per token, summed gradients of weighted losses, and their use.

Loss functions never see a model. Aggregation is a weight per token: the caller divides by the
number of tokens (or actions) it averages over, so the sum over any split of a batch is exact.

A model enters as a `SplitModel`: a static graph, the trained arrays and the frozen ones (the base
below an adapter; otherwise empty).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.learner.logprobs import Allowed, TokenLoss, score_tokens, token_loss
from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.packing import Rows
from jax_ragrl.learner.targets import KL_ESTIMATORS, Targets
from jax_ragrl.losses import clipped_value_loss, value_loss
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.heads import ActorCritic, Critic
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.dispatch import in_order


class TrainState(NamedTuple):
    """Parameters and optimizer state of one trained model.

    The field names are part of the checkpoint format.
    """

    params: Any
    opt_state: Any


class TokenOutputs(NamedTuple):
    """Outputs of a model for each scored token, `[R, M]`, 0 on padding; None without such a head.

    Fields:
      logp_RM: float32 log-probability of the token, in nats.
      entropy_RM: float32 entropy of the distribution before the token, in nats.
      likeliest_RM: bool, whether the token was the most likely one.
      value_RM: float32 value of the state before the token.
      loss: float32 scalar, the sum of the token losses if a loss was requested. Then only `loss`
        and `value_RM` are differentiable.
    """

    logp_RM: Array | None
    entropy_RM: Array | None
    likeliest_RM: Array | None
    value_RM: Array | None
    loss: Array | None = None


def token_outputs(
    model: Decoder | Critic | ActorCritic,
    rows: Rows,
    temperature: Array,
    allowed_ZV: Allowed | None = None,
    loss: TokenLoss | None = None,
    loss_inputs: Callable[[Callable[[], Array]], Any] | None = None,
) -> TokenOutputs:
    """Runs one forward pass of a policy, a critic, or both on one trunk.

    Logits are divided by the float32 `temperature`; `allowed_ZV` are the tokens that the grammar of
    each role allows, None: all.

    Args:
      loss: a loss per policy token, see `logprobs.token_loss`.
      loss_inputs: returns a tree of arrays `[R, M]` that `loss` receives. Its argument returns the
        log-probabilities of all tokens, for one more product with the vocabulary matrix.
    """
    trunk = model.trunk if isinstance(model, Critic) else _policy(model)
    hidden_RLD, _ = trunk(rows.ids_RL, rows.positions_RL, rows.until_RL)
    # Only the places that predict a scored token go through a head.
    hidden_RMD = jax.vmap(lambda hidden_LD, at_M: hidden_LD[at_M])(hidden_RLD, rows.source_RM)
    value_RM = None
    if not isinstance(model, Decoder):
        value_RM = jnp.where(rows.mask_RM, model.head(hidden_RMD), 0.0)
    if isinstance(model, Critic):
        return TokenOutputs(None, None, None, value_RM)
    policy, total = _policy(model), None
    tokens = (policy, hidden_RMD, rows, temperature, allowed_ZV)
    if loss is None or loss_inputs is None:
        scores = score_tokens(*tokens)
    else:
        inputs_RM = loss_inputs(lambda: score_tokens(*tokens).logp_RM)
        total, scores = token_loss(*tokens, loss, inputs_RM)
    logp_RM, entropy_RM = (jnp.where(rows.mask_RM, x, 0.0) for x in scores[:2])
    likeliest_RM = scores.likeliest_RM & rows.mask_RM
    return TokenOutputs(logp_RM, entropy_RM, likeliest_RM, value_RM, total)


def _policy(model: Decoder | ActorCritic) -> Decoder:
    return model.policy if isinstance(model, ActorCritic) else model


@in_order
@jax.jit
def score(
    model: SplitModel, rows: Rows, temperature: Array, allowed_ZV: Allowed | None = None
) -> TokenOutputs:
    return token_outputs(model.merge(), rows, temperature, allowed_ZV)


class Gradient(NamedTuple):
    """A sum of gradients and of their metrics (see `gradient`).

    `outputs` are the policy's outputs if it was not scored before: the metrics need them.
    """

    grads: Any
    sums: dict[str, Array]
    outputs: TokenOutputs | None = None


@in_order
@functools.partial(jax.jit, static_argnames=("objective", "layout"), donate_argnames="total")
def gradient(
    model: SplitModel,
    rows: Rows,
    targets: Targets,
    temperature: Array,
    kl_coefficient: Array,
    allowed_ZV: Allowed | None = None,
    *,
    objective: Objective,
    layout: tuple[Any, ...] | None = None,
    total: Any = None,
) -> Gradient:
    """Returns the gradient of the weighted losses of one batch with respect to `model.params`.

    The metric sums `loss/policy` and `loss/value` are weighted like the losses; `clipped`,
    `entropy`, `kl` and `tokens` are sums over tokens.

    Args:
      kl_coefficient: float32 scalar, used if the KL penalty is part of the loss.
      layout: the sharding of each parameter (`layout_of`), imposed on its gradient too. Without it
        the compiler may replicate a gradient on every device.
      total: a gradient to which this one is added; its buffers are donated.
    """

    def loss_of(params: Any) -> tuple[Array, tuple[dict[str, Array], TokenOutputs | None]]:
        full_model = dataclasses.replace(model, params=params).merge()

        def loss_inputs(logps: Callable[[], Array]) -> Any:
            # The chunked loss gets arrays `[R, M]`, so the coefficient becomes one.
            kl_RM = jnp.broadcast_to(kl_coefficient, rows.mask_RM.shape)
            return targets, kl_RM, _of_actions(objective, targets, rows.mask_RM, logps)

        loss_per_token = functools.partial(_token_loss, objective)
        outputs = token_outputs(
            full_model, rows, temperature, allowed_ZV, loss_per_token, loss_inputs
        )
        loss, sums, policy_outputs = jnp.zeros(()), dict[str, Array](), None
        if outputs.loss is not None:
            loss, sums = outputs.loss, _policy_sums(objective, outputs, targets, rows.mask_RM)
            if targets.old_logp is None:
                policy_outputs = TokenOutputs(outputs.logp_RM, outputs.entropy_RM, None, None)
        if outputs.value_RM is not None and targets.returns is not None:
            value = jnp.sum(_value_terms(objective, outputs, targets, rows.mask_RM))
            scale = objective.value_coefficient if objective.critic == "shared" else 1.0
            loss, sums = loss + scale * value, sums | {"loss/value": value}
        return loss, (sums, policy_outputs)

    if total is None:
        grads, (sums, policy_outputs) = jax.grad(loss_of, has_aux=True)(model.params)
    else:
        grads, (sums, policy_outputs) = _add_gradient(loss_of, model.params, total)
    return Gradient(constrain_layout(grads, layout), sums, policy_outputs)


def _add_gradient(loss_of: Any, params: Any, total: Any) -> tuple[Any, Any]:
    """Returns `total` plus the gradient of a loss, bitwise equal to adding both trees.

    The backward pass adds the gradient of each layer in place to the slice of that layer in
    `total`, so a second tree of all layers never exists. Parameters outside of the layers may be
    used twice (a tied embedding): their gradient is summed separately first.
    """
    if not all(x.size for x in jax.tree.leaves(total)):  # a model without layers
        grads, aux = jax.grad(loss_of, has_aux=True)(params)
        return jax.tree.map(jnp.add, total, grads), aux

    def is_layer(path: Any) -> bool:
        name = jax.tree_util.keystr(path)
        return "['layers']" in name or "['adapter']" in name

    pull: Any
    loss, pull, aux = jax.vjp(loss_of, params, has_aux=True)

    # 1. A mutable array per parameter: of layers it starts at the total, of others at zero.
    def begin(path: Any, x: Array) -> Any:
        return jax.new_ref(x if is_layer(path) else jnp.zeros_like(x))

    refs = jax.tree_util.tree_map_with_path(begin, total)
    # 2. The backward pass adds to them.
    pull.with_refs(refs)(jnp.ones_like(loss))

    # 3. The others are added to the total. The barrier keeps XLA from reordering that sum.
    def end(path: Any, x: Array, ref: Any) -> Array:
        grad: Array = jax.freeze(ref)
        return grad if is_layer(path) else x + jax.lax.optimization_barrier(grad)

    return jax.tree_util.tree_map_with_path(end, total, refs), aux


# `keep_unused` commits the zeros to the device of the parameters, like the later sums. Otherwise
# `gradient` would be compiled twice: for an uncommitted first total and for committed later ones.
@in_order
@functools.partial(jax.jit, static_argnames="layout", keep_unused=True)
def zeros(params: Any, layout: tuple[Any, ...] | None = None) -> Any:
    return constrain_layout(jax.tree.map(jnp.zeros_like, params), layout)


def layout_of(params: Any) -> tuple[Any, ...]:
    return tuple(x.sharding for x in jax.tree.leaves(params))


def constrain_layout(tree: Any, layout: tuple[Any, ...] | None) -> Any:
    """Imposes the sharding of each leaf inside a jitted function; None changes nothing."""
    if layout is None:
        return tree
    leaves, treedef = jax.tree.flatten(tree)
    leaves = list(map(jax.lax.with_sharding_constraint, leaves, layout))
    return jax.tree.unflatten(treedef, leaves)


def _token_loss(o: Objective, logp: Array, entropy: Array, mask: Array, inputs: Any) -> Array:
    t, kl_coefficient, of_action = inputs
    loss = _policy_loss(o, logp, t, mask, of_action)
    if o.kl.where == "loss":
        loss = loss + kl_coefficient * KL_ESTIMATORS[o.kl.estimator](logp, t.ref_logp, mask)
    if o.entropy_coefficient:
        loss = loss - o.entropy_coefficient * entropy
    return loss * t.weight


def _policy_loss(o: Objective, logp: Array, t: Targets, mask: Array, of_action: Any) -> Array:
    inputs = {"logp": logp, "old_logp": _old_logp(logp, t), "advantage": t.advantage}
    return o.policy_loss(mask, **inputs, **of_action)


def _old_logp(logp: Array, t: Targets) -> Array:
    # On fresh samples the old policy is the current one: the ratio is 1 and has its gradient.
    return jax.lax.stop_gradient(logp) if t.old_logp is None else t.old_logp


def _of_actions(
    o: Objective, t: Targets, mask_RM: Array, logps: Callable[[], Array]
) -> dict[str, Array]:
    """Returns what the policy loss reads of the action of each token, `[R, M]`, by name.

    `logps` returns the current log-probabilities of all tokens.
    """
    if t.first is None:
        return {}

    def total(x_RM: Array) -> Array:
        # An action is in one row: the place of its first token is its number in the row.
        row = lambda x_M, first_M: jax.ops.segment_sum(x_M, first_M, len(x_M))[first_M]  # noqa: E731
        return jax.vmap(row)(jnp.where(mask_RM, x_RM, 0.0), t.first)

    size_RM = total(jnp.ones_like(t.weight))
    gap_RM = jnp.zeros_like(size_RM)
    if o.reads("action_gap") and t.old_logp is not None:
        gap_RM = total(logps() - t.old_logp) / jnp.maximum(size_RM, 1.0)
    return {"action_size": size_RM, "action_gap": gap_RM}


def _policy_sums(
    o: Objective, outputs: TokenOutputs, t: Targets, mask_RM: Array
) -> dict[str, Array]:
    logp_RM, entropy_RM = outputs.logp_RM, outputs.entropy_RM
    assert logp_RM is not None and entropy_RM is not None
    ratio_RM = jnp.exp(logp_RM - _old_logp(logp_RM, t))
    of_action = _of_actions(o, t, mask_RM, lambda: logp_RM)
    sums = {
        "loss/policy": jnp.sum(_policy_loss(o, logp_RM, t, mask_RM, of_action) * t.weight),
        "clipped": _count(ratio_RM < 1 - o.eps_low, mask_RM)
        + _count(ratio_RM > 1 + o.eps_high, mask_RM),
        "entropy": jnp.sum(entropy_RM),
        "tokens": _count(mask_RM, mask_RM),
    }
    if o.kl.where == "loss":
        sums["kl"] = jnp.sum(KL_ESTIMATORS[o.kl.estimator](logp_RM, t.ref_logp, mask_RM))
    return sums


def _value_terms(o: Objective, outputs: TokenOutputs, t: Targets, mask_RM: Array) -> Array:
    value_RM = outputs.value_RM
    assert value_RM is not None
    if o.value_loss == "plain":
        loss_RM = value_loss(value_RM, t.returns, mask_RM)
    else:
        loss_RM = clipped_value_loss(value_RM, t.old_value, t.returns, mask_RM, clip=o.value_clip)
    return loss_RM * t.value_weight


def _count(flags_RM: Array, mask_RM: Array) -> Array:
    return jnp.sum(flags_RM & mask_RM, dtype=jnp.float32)


@in_order
@functools.partial(jax.jit, donate_argnames="total")
def add(total: Any, more: Any) -> Any:
    return jax.tree.map(jnp.add, total, more)


@in_order
@functools.partial(jax.jit, static_argnames="optimizer", donate_argnames="state")
def apply(
    optimizer: optax.GradientTransformation, state: TrainState, grads: Any
) -> tuple[TrainState, dict[str, Array]]:
    """Takes one optimizer step; a gradient that is not finite changes nothing.

    The buffers of `state` are donated. Metrics: `grad_norm`, `skipped` (1 if the gradient was not
    finite) and `not_finite` (1 if some new parameter or moment is not finite; see `check_finite`).
    """
    norm = optax.tree.norm(grads)  # of the unclipped gradient
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        next_state = TrainState(optax.apply_updates(state.params, updates), opt_state)
    # The norm is finite if and only if every element is, up to overflow of its square.
    finite = jnp.isfinite(norm)
    state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), next_state, state)
    # A finite gradient may still overflow a moment or, at a huge rate, a parameter.
    are_finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(state)])
    not_finite = 1.0 - jnp.all(are_finite).astype(jnp.float32)
    skip = jnp.where(finite, 0.0, 1.0)
    return state, {"grad_norm": norm, "skipped": skip, "not_finite": not_finite}


def check_finite(metrics: dict[str, float]) -> None:
    """Removes the flags `not_finite` of `apply` from metrics on the host.

    Raises `UserError` if one is set: saving such parameters would delete older checkpoints.
    """
    names = {"not_finite": "policy", "value/not_finite": "critic"}
    models = [model for key, model in names.items() if metrics.pop(key, 0.0)]
    if models:
        raise UserError(
            f"after an optimizer step parameters of the {' and the '.join(models)} are NaN or "
            "infinite: training has diverged, and the step is not saved. The newest checkpoint is "
            "from before; start a new run with a lower learning rate, from the beginning or from "
            "the policy that 'ragrl export' writes from that checkpoint"
        )
