"""Export for serving elsewhere, verified by reading the folder back."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.models.decoder import Decoder, causal_mask
from jax_ragrl.models.hf import load_decoder, save_decoder
from jax_ragrl.models.lora import load_lora, merge_lora, save_lora
from jax_ragrl.runtime.sharding import beside, mesh_of

PROBE = (2, 16)  # rows and tokens of the random ids that both models are asked about
TOLERANCE = 1e-4  # two layouts of the same numbers may add them in another order


class Exported(NamedTuple):
    """Where the model is, its size, and how far its logits are from the original's."""

    folder: Path
    num_bytes: int
    max_difference: float


def export(
    decoder: Decoder,
    folder: str | Path,
    tokenizer_folder: str | Path | None = None,
    *,
    dtype: str = "bfloat16",
) -> Exported:
    """Merge the adapter if there is one, save, load again, and compare logits.

    The comparison is with the decoder rounded to `dtype`, in float32 arithmetic: what is left is
    an error of writing or reading, and a `UserError`.
    """
    plain = decoder if decoder.adapter is None else merge_lora(decoder)
    folder = save_decoder(plain, folder, tokenizer_folder, dtype=dtype)
    back = load_decoder(folder, mesh_of(plain.embed[...]), "float32", param_dtype=dtype)
    return _verified(folder, _rounded(plain, dtype), back)


def export_adapter(decoder: Decoder, folder: str | Path, base_model: str | None = None) -> Exported:
    """The adapter alone in PEFT's layout; loaded again on the same base, and logits compared.

    `base_model` is the folder or name of the base. Raises `UserError` where there is no adapter.
    """
    folder = save_lora(decoder, folder, base_model)
    plain = Decoder.from_params(decoder.config, decoder.params())
    return _verified(folder, decoder, load_lora(plain, folder, mesh_of(plain.embed[...])))


def _verified(folder: Path, wanted: Decoder, back: Decoder) -> Exported:
    difference = max_logit_difference(wanted, back)
    if not difference <= TOLERANCE:
        raise UserError(
            f"{folder} was written but reads back with logits off by {difference:.3g}: "
            "the disk may be full or failing; delete it and export again"
        )
    return Exported(folder, sum(f.stat().st_size for f in folder.iterdir()), difference)


def max_logit_difference(one: Decoder, other: Decoder) -> float:
    """The largest difference of the two decoders' logits on a few random ids."""
    return float(jax.device_get(jnp.max(jnp.abs(_probe(one) - _probe(other)))))


def _probe(decoder: Decoder) -> Array:
    graphdef, state = nnx.split(decoder)
    ids_BL = np.random.default_rng(0).integers(0, decoder.config.vocab_size, PROBE, np.int32)
    return _logits(graphdef, state, beside(ids_BL, decoder.embed[...]))


@jax.jit(static_argnums=0)
def _logits(graphdef: nnx.GraphDef, state: nnx.State, ids_BL: Array) -> Array:
    decoder = nnx.merge(graphdef, state)
    positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1])[None], ids_BL.shape)
    return decoder.logits(decoder(ids_BL, positions_BL, causal_mask(jnp.ones_like(ids_BL)))[0])


def _rounded(decoder: Decoder, dtype: str) -> Decoder:
    """The decoder as it was written, computing in float32."""
    config = dataclasses.replace(decoder.config, param_dtype=dtype, dtype="float32")
    return Decoder.from_params(config, _cast(decoder.params(), dtype))


@functools.partial(jax.jit, static_argnums=1)
def _cast(params: dict, dtype: str) -> dict:
    return jax.tree.map(lambda x: x.astype(dtype), params)
