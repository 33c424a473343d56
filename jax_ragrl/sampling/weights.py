"""Converts trained weights for sampling: compute dtype, and not split along the batch axes.

Training keeps float32 weights that are split over every device. Decoding reads all weights once
per token, so without this copy they would be cast and gathered for every token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Sharding

from jax_ragrl.models.config import compute_dtype_of
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.dispatch import in_order
from jax_ragrl.runtime.sharding import Rules, local_part, without_batch_sharding

Form = tuple[jnp.dtype, Sharding]
# Devices that share a batch have whole weights; the tensor axis alone splits them.
SAMPLING_RULES = Rules(embed=None)


def for_sampling(
    decoders: Mapping[str, Decoder], donated_arrays: Iterable[Array] = ()
) -> dict[str, SplitModel]:
    """Returns split decoders for a rollout, which compute the same as `decoders`.

    Weights are in the compute dtype and split over the tensor axis alone. An array that already has
    this form is not copied, and one that several decoders share (a base below their adapters) is
    copied once. On several hosts this is a collective call; each process gets the model on its own
    devices and then samples independently.

    `donated_arrays` are copied in any case, because a program that runs during the rollout takes
    their buffers.
    """
    copied_ids = {id(x) for x in donated_arrays}
    splits = {name: SplitModel.from_model(decoder) for name, decoder in decoders.items()}
    # By identity, because decoders may share arrays: the arrays to copy, the forms of their copies.
    arrays: dict[int, Array] = {}
    forms: dict[int, Form] = {}
    for name, split in splits.items():
        for path, x in jax.tree_util.tree_leaves_with_path(split.params):
            dtype = compute_dtype_of(path, x, decoders[name].config.dtype)
            form = dtype, without_batch_sharding(x.sharding)
            has_form = x.dtype == form[0] and x.sharding.is_equivalent_to(form[1], x.ndim)
            if id(x) in copied_ids or not has_form:
                arrays[id(x)], forms[id(x)] = x, form
    copies = dict(zip(arrays, _cast_all([*arrays.values()], [*forms.values()]), strict=True))

    def own(x: Array) -> Array:
        return local_part(copies.get(id(x), x))

    return {name: jax.tree.map(own, split) for name, split in splits.items()}


def without_fsdp(model: SplitModel) -> SplitModel:
    """Returns a model whose weights are split over the tensor axis alone; their dtypes remain."""

    def whole(x: Array) -> Array:
        layout = without_batch_sharding(x.sharding)
        return x if x.sharding.is_equivalent_to(layout, x.ndim) else jax.device_put(x, layout)

    whole_model: SplitModel = jax.tree.map(whole, model)
    return whole_model


def _cast_all(arrays: list[Array], forms: list[Form]) -> list[Array]:
    """Casts all arrays in one program, which later updates with the same shapes reuse."""
    dtypes, layouts = tuple(dtype for dtype, _ in forms), [layout for _, layout in forms]
    cast = in_order(jax.jit(_cast, static_argnums=1, out_shardings=layouts))
    copies: list[Array] = cast(arrays, dtypes)
    return copies


def _cast(arrays: list[Array], dtypes: tuple[jnp.dtype, ...]) -> list[Array]:
    return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]
