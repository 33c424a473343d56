"""The trained models of a run: static specification and state, built from a decoder.

A `Policy` is the pair of a `PolicySpec`, which an update does not change, and a `PolicyState`,
which it changes and which is saved.
"""

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
from jax_ragrl.learner.gradients import TrainState, layout_of
from jax_ragrl.learner.grammars import RoleGrammars
from jax_ragrl.learner.objective import Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.models.config import compute_dtype_of
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.heads import ActorCritic, Critic
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.free_work import count_elements, free_tokens
from jax_ragrl.runtime.sharding import mesh_of, replicate
from jax_ragrl.runtime.small_programs import uses_one_core
from jax_ragrl.sampling.weights import for_sampling


class ModelSpec(NamedTuple):
    """The constant part of one trained model.

    Fields:
      layout: shardings of the trained parameters (`layout_of`) on a mesh, else None. Equal
        shardings can be spelled differently; this one spelling avoids a second compilation.
    """

    graph: Any
    frozen: Any
    optimizer: optax.GradientTransformation
    layout: tuple[Any, ...] | None

    def with_params(self, params: Any) -> SplitModel:
        return SplitModel(self.graph, params, self.frozen)


class PolicyState(NamedTuple):
    """Everything that an update changes; the field names are part of the checkpoint format.

    With an adapter, only the adapter is stored here, and the reference is an adapter too. `critic`
    is a separate one. `reference` are the parameters of the reference policy of a KL penalty, in
    the dtypes of its forward pass (see `compute_dtype_of`). The KL coefficient is a float32 scalar.
    """

    policy: TrainState
    critic: TrainState | None
    reference: Any
    kl_coefficient: Any


class PolicySpec(NamedTuple):
    """Everything that an update does not change; role numbers are indices into `roles`.

    Fields:
      temperature: sampling temperature, at which tokens are scored.
      allowed_ZV: the tokens that the grammar of each role allows: bool, or the automaton of
        `grammars`; None: all.
      grammars: the strict grammars of the roles, on the host; None without any.
      shares_devices: whether rollouts use the devices during updates.
    """

    policy: ModelSpec
    critic: ModelSpec | None
    objective: Objective
    optimizer: Optimizer
    layout: Layout
    roles: tuple[str, ...]
    temperature: float
    mesh: Mesh | None
    allowed_ZV: Any = None
    grammars: RoleGrammars | None = None
    shares_devices: bool = False

    def is_concurrent(self, params: Any) -> bool:
        """Whether programs of a model with these parameters may run at the same time."""
        return not self.shares_devices and uses_one_core(params, self.mesh)

    def give_way(self, outputs: Any) -> None:
        """Waits for the outputs of a program of an update if rollouts use the devices too.

        Devices run programs in the order of their start, so that a rollout would wait for all
        programs of an update that were started before its own.
        """
        if self.shares_devices:
            jax.block_until_ready(outputs)


class Policy(NamedTuple):
    spec: PolicySpec
    state: PolicyState

    def with_state(self, **changes: Any) -> Policy:
        return self._replace(state=self.state._replace(**changes))


def prepare(
    decoder: Decoder,
    *,
    objective: Objective,
    optimizer: Optimizer,
    layout: Layout,
    roles: Sequence[str],
    temperature: float,
    updates: int,
    compute: str | None = None,
    remat: str | None = None,
    allowed_ZV: np.ndarray | None = None,
    grammars: RoleGrammars | None = None,
    shares_devices: bool = False,
) -> Policy:
    """Builds the policy of a run from a decoder, which remains unchanged.

    Args:
      decoder: its weights in the storage dtype (float32 for training). The run uses their mesh, or
        one device. If it has an adapter, only the adapter is trained, and a critic of its own is
        another adapter on the same base.
      updates: number of updates in the run, the length of the learning-rate schedule.
      compute: dtype of forward and backward passes; None: from the decoder's config.
      remat: see `DecoderConfig`; None: from the decoder's config.
      allowed_ZV: bool, the tokens that the grammar of each role allows; None: all.
      grammars: strict grammars in place of `allowed_ZV`.
      shares_devices: whether rollouts use the devices during updates (`run.staleness`).

    Raises:
      UserError: the objective has a separate critic, but no learning rate for it.
    """
    if objective.critic == "own" and optimizer.value_lr <= 0:
        raise UserError("optimizer.value_lr is 0, but the objective has a separate critic: set it")
    decoder, weights = _with_config(decoder, compute, remat), nnx.state(decoder, nnx.Param)
    actor, critic, state = _models(decoder, objective, optimizer, updates)
    mesh = mesh_of(weights)
    free = free_tokens(count_elements(weights), mesh, is_trained=True)
    token_mask = allowed_ZV if grammars is None else grammars.automaton
    spec = PolicySpec(
        policy=actor,
        critic=critic,
        objective=objective,
        optimizer=optimizer,
        layout=layout.coarse(free),
        roles=tuple(roles),
        temperature=temperature,
        mesh=mesh,
        allowed_ZV=None if token_mask is None else replicate(token_mask, mesh),
        grammars=grammars,
        shares_devices=shares_devices,
    )
    return Policy(spec, state)


def _models(
    decoder: Decoder, objective: Objective, optimizer: Optimizer, updates: int
) -> tuple[ModelSpec, ModelSpec | None, PolicyState]:
    weights = nnx.state(decoder, nnx.Param)
    mesh, sharding = mesh_of(weights), _replicated_sharding(weights)

    def build(model: Any, rate: float) -> tuple[ModelSpec, TrainState, Any]:
        split, transform = _split(model, sharding), optimizer.transform(rate, updates)
        layout = layout_of(split.params) if isinstance(sharding, NamedSharding) else None
        # Copies, since an update donates the buffers that it trains.
        copies = jax.tree.map(jnp.copy, split.params)
        state = TrainState(copies, _optimizer_state(transform, split.params, sharding))
        return ModelSpec(split.graph, split.frozen, transform, layout), state, split.params

    shared = ActorCritic(decoder) if objective.critic == "shared" else decoder
    actor, policy, params = build(shared, optimizer.policy_lr)
    reference = _reference(objective, params, decoder.config.dtype)
    state = PolicyState(policy, None, reference, scalar(objective.kl.coefficient, mesh))
    if objective.critic != "own":
        return actor, None, state
    critic, critic_state, _ = build(Critic(decoder), optimizer.value_lr)
    return actor, critic, state._replace(critic=critic_state)


def _reference(objective: Objective, params: Any, compute: str) -> Any:
    """Casts parameters as the forward pass would, whose results stay bitwise the same.

    Arrays that have the dtype already are shared. Without a KL penalty there is no reference.
    """
    if objective.kl.where == "none":
        return None

    def cast(path: Any, x: jax.Array) -> jax.Array:
        return x.astype(compute_dtype_of(path, x, compute))

    return jax.tree_util.tree_map_with_path(cast, params)


def _with_config(decoder: Decoder, compute: str | None, remat: str | None) -> Decoder:
    changes = {"dtype": compute, "remat": remat}
    changes = {name: value for name, value in changes.items() if value is not None}
    # A new module object around the same arrays: the caller's decoder keeps its config.
    decoder = nnx.merge(*nnx.split(decoder))
    decoder.config = dataclasses.replace(decoder.config, **changes)  # type: ignore[arg-type]
    return decoder


def _replicated_sharding(weights: Any) -> Sharding | None:
    """Returns a replicated sharding that matches `weights`; None if they are uncommitted.

    Mixing committed and uncommitted arrays would compile a second program.
    """
    if (mesh := mesh_of(weights)) is not None:
        return NamedSharding(mesh, PartitionSpec())
    return next((x.sharding for x in jax.tree.leaves(weights) if x.committed), None)


def _split(model: Any, sharding: Sharding | None) -> SplitModel:
    """Splits a model without copies; of a model with an adapter, adapter and heads are trained."""
    has_adapter = any(isinstance(x, nnx.LoRAParam) for _, x in nnx.iter_graph(model))
    # A value head is new and must be trained, even if the base below the adapter is frozen.
    trained_filter = nnx.Any(nnx.LoRAParam, nnx.PathContains("head")) if has_adapter else nnx.Param
    split = SplitModel.from_model(model, trained_filter)
    if sharding is None:
        return split

    def commit(x: jax.Array) -> Any:
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return replicate(x, sharding.mesh)
        return jax.device_put(x, sharding)

    # A new value head, and an adapter without a mesh, are not committed to a device yet.
    params = jax.tree.map(lambda x: x if x.committed else commit(x), split.params)
    return dataclasses.replace(split, params=params)


def _optimizer_state(
    transform: optax.GradientTransformation, params: Any, sharding: Sharding | None
) -> Any:
    """Initializes the optimizer state, sharded like the parameters from the start."""
    if sharding is None:
        return jax.jit(transform.init)(params)
    # Moments are sharded like their parameters, scalars are replicated. Initializing them unsharded
    # would need a full copy on one device.
    layout = optax.tree_map_params(
        transform,
        lambda _, x: x.sharding,
        jax.eval_shape(transform.init, params),
        params,
        transform_non_params=lambda _: sharding,
    )
    return jax.jit(transform.init, out_shardings=layout)(params)


def trained_decoder(policy: Policy) -> Decoder:
    """Returns the policy as a decoder around the trained arrays, which the next update donates."""
    return _decoder_of(policy.spec.policy.with_params(policy.state.policy.params))


def _decoder_of(split: SplitModel) -> Decoder:
    model = split.merge()
    return model.policy if isinstance(model, ActorCritic) else model


def restored_decoders(
    decoders: Mapping[str, Decoder],
    objective: Objective,
    read: Callable[[Any], Any],
    *,
    compute: str | None = None,
    remat: str | None = None,
) -> dict[str, Decoder]:
    """Reads the policies of a checkpoint without optimizer state, critics and references.

    `decoders` are those that `prepare` received in that run, by policy; `read` reads a part of the
    saved state into the tree of its argument (`Checkpoints.restore_part`).
    """
    split = {}
    for name, decoder in decoders.items():
        actor: Any = _with_config(decoder, compute, remat)
        actor = ActorCritic(actor) if objective.critic == "shared" else actor
        split[name] = _split(actor, _replicated_sharding(nnx.state(decoder, nnx.Param)))
    state = read({name: {"policy": {"params": model.params}} for name, model in split.items()})
    return {
        name: _decoder_of(dataclasses.replace(model, params=state[name]["policy"]["params"]))
        for name, model in split.items()
    }


def sampling_model(policy: Policy) -> SplitModel:
    return for_sampling({"policy": trained_decoder(policy)})["policy"]


def scalar(value: float, mesh: Mesh | None) -> jax.Array:
    array: jax.Array = replicate(np.float32(value), mesh)
    return array
