"""What a run trains: models split into what changes and what stays, and their optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jax_ragrl.errors import UserError
from jax_ragrl.learner.gradients import Learner, layout_of
from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.models.config import used_as
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.heads import ActorCritic, Critic
from jax_ragrl.runtime.sharding import mesh_of, replicate, share
from jax_ragrl.sampling.weights import for_sampling


class Net(NamedTuple):
    """What stays of one trained model: its graph, its frozen parameters, its optimizer, and on a
    mesh the layout of what is trained (`layout_of`): one spelling of it, one compilation."""

    graph: Any
    frozen: Any
    optimizer: optax.GradientTransformation
    layout: tuple[Any, ...] | None


class Models(NamedTuple):
    """What an update changes, and what is saved: a critic of its own, a reference and the KL
    coefficient (float32) are there where the objective has them. The reference is kept as a forward
    pass takes it (see `used_as`). Of a model with an adapter only the adapter is here; the
    reference then is an adapter too."""

    policy: Learner
    critic: Learner | None
    reference: Any
    kl_coefficient: Any


class Trainer(NamedTuple):
    """What an update does not change. `allowed_ZV` are the tokens that each role may write."""

    policy: Net
    critic: Net | None
    objective: Objective
    optimizer: Optimizer
    layout: Layout
    roles: tuple[str, ...]
    temperature: float
    mesh: Mesh | None
    allowed_ZV: Any = None


def prepare(
    policy: Decoder,
    objective: Objective,
    optimizer: Optimizer,
    layout: Layout,
    roles: Sequence[str],
    temperature: float,
    steps: int,
    *,
    compute: str | None = None,
    remat: str | None = None,
    allowed_ZV: np.ndarray | None = None,
) -> tuple[Trainer, Models]:
    """Trainer and models of a run of `steps` updates from `policy`, which stays as it is.

    Where there is a reference, it is the arrays of `policy` themselves, cast where it computes in
    another dtype.

    Args:
      policy: its weights in the storage dtype (float32 for training). The run is laid out as they
        are: over their mesh, or on one device. With an adapter, only that is trained, and a critic
        of its own is an adapter beside the same base.
      roles: the names of all roles; actions are numbered by them.
      temperature: of sampling; scores are taken at it.
      compute: dtype of the forward and backward passes; by default as in the policy's config.
      remat: what the backward pass computes again, see `DecoderConfig`; by default likewise.
      allowed_ZV: bool, the tokens that each role's grammar lets it write; None: all.

    Raises `UserError` for choices that do not fit together.
    """
    objective.weights_of(roles)
    if objective.critic == "own" and optimizer.value_lr <= 0:
        raise UserError(
            "optimizer.value_lr is 0, but the objective has a critic of its own: set it"
        )
    weights = nnx.state(policy, nnx.Param)
    mesh, whole = mesh_of(weights), _whole(weights)
    policy = _computing(policy, compute, remat)
    net, given = _net(
        _actor(policy, objective), optimizer.transform(optimizer.policy_lr, steps), whole
    )
    models = Models(_learner(net, given, whole), None, None, scalar(objective.kl.coefficient, mesh))
    if objective.kl.where != "none":
        models = models._replace(reference=_reference(given, policy.config.dtype))
    critic = None
    if objective.critic == "own":
        transform = optimizer.transform(optimizer.value_lr, steps)
        critic, given = _net(Critic(policy), transform, whole)
        models = models._replace(critic=_learner(critic, given, whole))
    fixed = (objective, optimizer, layout, tuple(roles), temperature, mesh)
    allowed = None if allowed_ZV is None else share(allowed_ZV, mesh)
    return Trainer(net, critic, *fixed, allowed), models


def _reference(params: Any, compute: str) -> Any:
    """Parameters that only a forward pass reads: scores are the same to the last bit."""

    def kept(path: Any, x: jax.Array) -> jax.Array:
        dtype = used_as(path, x, compute)
        return x if x.dtype == dtype else x.astype(dtype)

    return jax.tree_util.tree_map_with_path(kept, params)


def refresh(params: Any) -> Any:
    """The same in buffers of its own, for an update donates what it trains."""
    return jax.tree.map(jnp.copy, params)


def _computing(policy: Decoder, compute: str | None, remat: str | None) -> Decoder:
    """The same weights, computed otherwise."""
    changes = {"dtype": compute, "remat": remat}
    given = {name: value for name, value in changes.items() if value is not None}
    policy = nnx.merge(*nnx.split(policy))
    policy.config = dataclasses.replace(policy.config, **given)  # type: ignore[arg-type]
    return policy


def _whole(weights: Any) -> Sharding | None:
    """The layout, beside weights, of what every device holds whole; None where they were put on no
    device in particular: then nothing else is. One that was and one that was not make two programs.
    """
    if (mesh := mesh_of(weights)) is not None:
        return NamedSharding(mesh, PartitionSpec())
    return next((x.sharding for x in jax.tree.leaves(weights) if x.committed), None)


def _net(
    model: Any, transform: optax.GradientTransformation, whole: Sharding | None
) -> tuple[Net, Any]:
    """What stays of a model, and the parameters to train."""
    graph, params, frozen = _split(model, whole)
    layout = layout_of(params) if isinstance(whole, NamedSharding) else None
    return Net(graph, frozen, transform, layout), params


def _actor(policy: Decoder, objective: Objective) -> Decoder | ActorCritic:
    return ActorCritic(policy) if objective.critic == "shared" else policy


def _split(model: Any, whole: Sharding | None) -> tuple[Any, Any, Any]:
    """Graph, parameters to train and frozen ones, which are still the model's own arrays. With an
    adapter, it and heads are trained."""
    adapted = any(isinstance(x, nnx.LoRAParam) for _, x in nnx.iter_graph(model))
    kept = nnx.Any(nnx.LoRAParam, nnx.PathContains("head")) if adapted else nnx.Param
    graph, params, frozen = nnx.split(model, kept, ...)  # type: ignore[misc]
    if whole is not None:
        # A value head, and an adapter without a mesh, were made on no device in particular.
        params = jax.tree.map(lambda x: x if x.committed else _put(x, whole), params)
    return graph, params, frozen


def _put(x: jax.Array, whole: Sharding) -> Any:
    if not isinstance(whole, NamedSharding):
        return jax.device_put(x, whole)
    assert isinstance(whole.mesh, Mesh), "not an abstract one"
    return replicate(x, whole.mesh)


def _learner(net: Net, params: Any, whole: Sharding | None) -> Learner:
    return Learner(refresh(params), _state(net.optimizer, params, whole))


def _state(transform: optax.GradientTransformation, params: Any, whole: Sharding | None) -> Any:
    """The optimizer's state, laid out as the parameters are; no device holds a whole copy."""
    if whole is None:
        return jax.jit(transform.init)(params)
    layout = optax.tree_map_params(
        transform,
        lambda _, x: x.sharding,
        jax.eval_shape(transform.init, params),
        params,
        transform_non_params=lambda _: whole,
    )
    return jax.jit(transform.init, out_shardings=layout)(params)


def trained(trainer: Trainer, models: Models) -> Decoder:
    """The policy around the arrays that are trained: an update donates them."""
    return _merged(trainer.policy.graph, models.policy.params, trainer.policy.frozen)


def _merged(graph: Any, params: Any, frozen: Any) -> Decoder:
    model = nnx.merge(graph, params, frozen)
    return model.policy if isinstance(model, ActorCritic) else model


def saved(
    policies: Mapping[str, Decoder],
    objective: Objective,
    read: Callable[[Any], Any],
    *,
    compute: str | None = None,
    remat: str | None = None,
) -> dict[str, Decoder]:
    """The policies as a checkpoint of their run has them, without the rest of it: no optimizer, no
    critic, no reference. Policies and choices are those that `prepare` got; `read` gives a part of
    the state of a run in the tree of its argument (`Checkpoints.restore_part`)."""
    parts = {}
    for name, policy in policies.items():
        actor = _actor(_computing(policy, compute, remat), objective)
        parts[name] = _split(actor, _whole(nnx.state(policy, nnx.Param)))
    found = read({name: {"policy": {"params": part[1]}} for name, part in parts.items()})
    return {
        name: _merged(graph, found[name]["policy"]["params"], frozen)
        for name, (graph, _, frozen) in parts.items()
    }


def acting(trainer: Trainer, models: Models) -> tuple[Any, Any]:
    """Graph and parameters of the policy as a sampler takes them until the next update: cast and
    laid out once, see `for_sampling`."""
    return for_sampling({"policy": trained(trainer, models)})["policy"]


def scalar(value: float, mesh: Mesh | None) -> jax.Array:
    """A float32 number on the devices."""
    array: jax.Array = share(np.float32(value), mesh)
    return array
