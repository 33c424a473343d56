"""Exports policies in Hugging Face format and verifies each export by reading it back."""

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
from jax_ragrl.models.lora import merge_lora
from jax_ragrl.models.peft import load_lora, save_lora
from jax_ragrl.runtime.sharding import mesh_of, replicate_like

PROBE = (2, 16)  # rows and tokens of the random ids on which logits are compared
TOLERANCE = 1e-4  # different layouts of equal weights may add numbers in another order


class ExportResult(NamedTuple):
    """The folder, its size, and the largest difference of its logits from the original's."""

    folder: Path
    num_bytes: int
    max_difference: float


def export(
    decoder: Decoder,
    folder: str | Path,
    tokenizer_folder: str | Path | None = None,
    *,
    dtype: str = "bfloat16",
) -> ExportResult:
    """Exports a decoder in a dtype, with its adapter merged if it has one.

    The files of a tokenizer are copied from `tokenizer_folder`, if it is given. `UserError` if the
    folder reads back with other logits than the decoder rounded to `dtype`.
    """
    plain = decoder if decoder.adapter is None else merge_lora(decoder)
    folder = save_decoder(plain, folder, tokenizer_folder, dtype=dtype)
    # Both sides compute in float32 from weights rounded to `dtype`: any remaining difference is an
    # error of writing or reading.
    copy = load_decoder(folder, mesh_of(plain.embed[...]), "float32", param_dtype=dtype)
    config = dataclasses.replace(plain.config, param_dtype=dtype, dtype="float32")
    rounded = Decoder.from_params(config, _cast(plain.params(), dtype))
    return _verify(folder, rounded, copy)


def export_adapter(
    decoder: Decoder,
    folder: str | Path,
    base_model: str | None = None,
    revision: str | None = None,
) -> ExportResult:
    """Exports only the adapter, in PEFT format, whose config names the base model and its revision.

    Raises `UserError` if there is no adapter, or it reads back with other logits.
    """
    folder = save_lora(decoder, folder, base_model, revision)
    base = Decoder.from_params(decoder.config, decoder.params())
    return _verify(folder, decoder, load_lora(base, folder, mesh_of(base.embed[...])))


def _verify(folder: Path, original: Decoder, copy: Decoder) -> ExportResult:
    difference = max_logit_difference(original, copy)
    # `not <=` instead of `>`, so that nan fails.
    if not difference <= TOLERANCE:
        raise UserError(
            f"the export reads back with logits off by {difference:.3g}: the disk may be full or "
            "failing; export again, into a new folder"
        )
    return ExportResult(folder, sum(f.stat().st_size for f in folder.iterdir()), difference)


def max_logit_difference(one: Decoder, other: Decoder) -> float:
    """The largest absolute difference of two decoders' logits on a few random ids."""
    ids_BL = np.random.default_rng(0).integers(0, one.config.vocab_size, PROBE, np.int32)
    pair = [_logits(*nnx.split(x), replicate_like(ids_BL, x.embed[...])) for x in (one, other)]
    return float(jax.device_get(jnp.max(jnp.abs(pair[0] - pair[1]))))


@jax.jit(static_argnums=0)
def _logits(graphdef: nnx.GraphDef, state: nnx.State, ids_BL: Array) -> Array:
    decoder = nnx.merge(graphdef, state)
    positions_BL = jnp.broadcast_to(jnp.arange(ids_BL.shape[1])[None], ids_BL.shape)
    return decoder.logits(decoder(ids_BL, positions_BL, causal_mask(jnp.ones_like(ids_BL)))[0])


@functools.partial(jax.jit, static_argnums=1)
def _cast(params: dict, dtype: str) -> dict:
    return jax.tree.map(lambda x: x.astype(dtype), params)
