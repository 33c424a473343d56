"""Weights as a sampler takes them: in the compute dtype, and whole where a batch is split.

Training keeps float32 weights split over every device. A decoder that samples reads all of them
once a token: cast and gathered there, they would be cast and gathered with every token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Sharding

from jax_ragrl.models.config import used_as
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.runtime.sharding import own_part, whole_along_batch

Form = tuple[jnp.dtype, Sharding]


def for_sampling(decoders: Mapping[str, Decoder]) -> dict[str, tuple[Any, Any]]:
    """Graph and parameters of decoders for a rollout, split over the tensor axis alone.

    They compute what the decoders compute. On a mesh without a tensor axis every device holds them
    whole in the compute dtype, for as long as they are kept (2 bytes a parameter in bfloat16: 16 GB
    at 8 billion); where that is too much, give the mesh a wider tensor axis. What is in that form
    already is not copied, and what decoders share (a base below their adapters) is copied once. On
    several hosts each gets them on its own devices: all take part, and then sample by themselves.
    """
    split = {name: nnx.split(decoder, nnx.Param) for name, decoder in decoders.items()}
    # By identity: the arrays to copy, and the forms of their copies.
    arrays: dict[int, Array] = {}
    forms: dict[int, Form] = {}
    for name, (_, params) in split.items():
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            form = _form(path, x, decoders[name].config.dtype)
            if not _has(x, form):
                arrays[id(x)], forms[id(x)] = x, form
    copies = dict(zip(arrays, _copied([*arrays.values()], [*forms.values()]), strict=True))

    def own(x: Array) -> Array:
        return own_part(copies.get(id(x), x))

    return {name: (graph, jax.tree.map(own, params)) for name, (graph, params) in split.items()}


def _form(path: Any, x: Array, compute: str) -> Form:
    return used_as(path, x, compute), whole_along_batch(x.sharding)


def _has(x: Array, form: Form) -> bool:
    return x.dtype == form[0] and x.sharding.is_equivalent_to(form[1], x.ndim)


def _copied(arrays: list[Array], forms: list[Form]) -> list[Array]:
    """All of them by one program, compiled once for their shapes."""
    dtypes, layouts = tuple(dtype for dtype, _ in forms), [layout for _, layout in forms]
    return jax.jit(_cast, static_argnums=1, out_shardings=layouts)(arrays, dtypes)


def _cast(arrays: list[Array], dtypes: tuple[jnp.dtype, ...]) -> list[Array]:
    return [x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True)]
