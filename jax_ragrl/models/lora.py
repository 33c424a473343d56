"""Low-rank adapters (LoRA): a separate policy per adapter, a few million parameters on one base.

  y = x W + (alpha / rank) (x A) B,   A: [in, rank],  B: [rank, out]

Hu et al. 2021 (arXiv 2106.09685). An adapter is the attribute `Decoder.adapter`. Its variables are
`nnx.LoRAParam`, so `SplitModel.from_model(decoder, nnx.LoRAParam)` separates the trained arrays
from the frozen base. Decoders with adapters on one base share its buffers.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jax_ragrl.config.ranges import Count, Positive
from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig, Weight, input_axes, layer_weights
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.runtime.sharding import mesh_of, replicate, tree_shardings

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """The size of an adapter.

    Fields:
      rank: columns of A and rows of B.
      alpha: the adapter's term is scaled by `alpha / rank`.
      targets: the names of the projections that are adapted.
    """

    rank: Count = 16
    alpha: Positive = 32.0
    targets: tuple[str, ...] = ATTENTION + MLP

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.targets:
            raise UserError(
                f"LoRA of rank {self.rank} on {len(self.targets)} targets trains nothing: give a "
                "rank of at least 1 and at least one target"
            )
        for name in self.targets:
            if name not in ATTENTION + MLP:
                raise UserError(
                    f"LoRA target {name!r} is not a projection: use some of "
                    f"{', '.join(ATTENTION + MLP)}"
                )


def adapter_weights(config: DecoderConfig, lora: LoRAConfig) -> dict[str, Weight]:
    """Returns `<target>_lora_a` and `<target>_lora_b`, stacked over layers.

    B starts at zero, so a fresh adapter changes nothing.
    """
    table = {}
    for name in sorted(lora.targets):
        ins, outs, axes = adapter_sides(config, name)
        fan_in = math.prod(ins)
        table[f"{name}_lora_a"] = Weight(
            (config.num_layers, *ins, lora.rank),
            ("layers", *axes[: len(ins)], None),
            std=fan_in**-0.5,
        )
        table[f"{name}_lora_b"] = Weight(
            (config.num_layers, lora.rank, *outs), ("layers", None, *axes[len(ins) :])
        )
    return table


def adapter_sides(config: DecoderConfig, name: str) -> tuple[tuple, tuple, tuple]:
    """Returns the input dimensions, the output dimensions and the logical axes of a projection."""
    weight = layer_weights(config)[name]
    inputs = input_axes(name)
    return weight.shape[:inputs], weight.shape[inputs:], weight.axes


def add_lora(decoder: Decoder, lora: LoRAConfig, *, rngs: nnx.Rngs) -> Decoder:
    """Returns a decoder that shares the base arrays and has a fresh float32 adapter.

    Until it is trained, it computes the same as the base. The adapter is on the mesh of the base.
    """
    mesh, key, layout = mesh_of(decoder.params()), rngs.params(), None
    table = adapter_weights(decoder.config, lora)
    if mesh is not None:
        shapes = {name: jax.ShapeDtypeStruct(w.shape, jnp.float32) for name, w in table.items()}
        layout = tree_shardings({name: w.axes for name, w in table.items()}, shapes, mesh)
        key = replicate(key, mesh)
    init = jax.jit(_init_adapter, static_argnums=0, out_shardings=layout)
    return with_adapter(decoder, init(tuple(table.items()), key), lora.alpha / lora.rank)


def _init_adapter(table: tuple[tuple[str, Weight], ...], key: Array) -> dict[str, Array]:
    keys = jax.random.split(key, len(table))
    return {
        name: w.std * jax.random.normal(keys[i], w.shape) if w.std else jnp.zeros(w.shape)
        for i, (name, w) in enumerate(table)
    }


def with_adapter(decoder: Decoder, arrays: dict[str, Array], scale: float) -> Decoder:
    """Returns a decoder around the base arrays of `decoder` and the arrays of an adapter.

    `arrays` are named as in `adapter_weights`, `scale` is the factor `alpha / rank` of its term.
    """
    result = nnx.merge(*nnx.split(decoder))
    result.adapter = nnx.Dict({name: nnx.LoRAParam(x) for name, x in arrays.items()})
    result.adapter_scale = float(scale)
    return result


def adapter_arrays(decoder: Decoder) -> dict[str, Array]:
    """Returns the arrays of the adapter by name; raises `UserError` if there is none."""
    if decoder.adapter is None:
        raise UserError(
            "this decoder carries no adapter: train with lora, or export without --adapter"
        )
    return {name: value[...] for name, value in decoder.adapter.items()}


def lora_config(decoder: Decoder) -> LoRAConfig:
    arrays = adapter_arrays(decoder)
    targets = tuple(n.removesuffix("_lora_a") for n in arrays if n.endswith("_lora_a"))
    # B is `[layers, rank, out...]` for every target, A has the rank last.
    rank = next(x.shape[1] for n, x in arrays.items() if n.endswith("_lora_b"))
    return LoRAConfig(rank, decoder.adapter_scale * rank, targets)


def merge_lora(decoder: Decoder) -> Decoder:
    """Returns a decoder without adapter that computes the same: `W + scale A B`.

    The sum is rounded once, to the storage dtype.
    """
    arrays, params = adapter_arrays(decoder), decoder.params()
    layers = dict(params["layers"])
    for name in lora_config(decoder).targets:
        a, b = arrays[f"{name}_lora_a"], arrays[f"{name}_lora_b"]
        layers[name] = _merge(layers[name], a, b, decoder.adapter_scale)
    return Decoder.from_params(decoder.config, params | {"layers": layers})


@functools.partial(jax.jit, static_argnames="scale")
def _merge(kernel: Array, a: Array, b: Array, scale: float) -> Array:
    layers, rank = a.shape[0], a.shape[-1]
    update = jnp.einsum(
        "nir,nro->nio", a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
    ).reshape(kernel.shape)
    return (kernel.astype(jnp.float32) + jnp.float32(scale) * update).astype(kernel.dtype)
