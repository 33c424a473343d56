"""Eight-bit weights for a decoder that only generates: the frozen language model.

Projections are stored as int8 with one scale per output channel (by Qwix) and converted to the
compute dtype one layer at a time, right before their matmul: half the memory of bfloat16.
Embeddings, norms and biases are unchanged. Such a decoder is not for training and cannot be saved.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import layer_weights
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.hf import layout_of


def quantize_decoder(decoder: Decoder) -> Decoder:
    """Returns a decoder with int8 projections; `UserError` without Qwix or with an adapter."""
    if decoder.adapter is not None:
        raise UserError(
            "this decoder has an adapter, not supported in int8: merge_lora it before quantizing"
        )
    _qwix()  # fails before any work if it is missing
    params = decoder.params()
    layers = dict(params["layers"])
    for name, weight in layer_weights(decoder.config).items():
        # Only kernels have input axes; norms and biases have none.
        if inputs := layout_of(name, weight).inputs:
            layers[name] = _quantize(layers[name], inputs)
    return Decoder.from_params(decoder.config, params | {"layers": layers})


@functools.partial(jax.jit, static_argnums=1)
def _quantize(stack: Array, inputs: int) -> Any:
    """Quantizes a stacked kernel `[layers, in..., out...]`, a scale for each layer and output."""
    channels = (0, *range(1 + inputs, stack.ndim))
    return _qwix().quantize(stack, jnp.int8, channelwise_axes=channels, scale_dtype=jnp.float32)


def _qwix() -> Any:
    try:
        import qwix
    except ImportError as e:
        raise UserError(
            "int8 weights need Qwix, which is not installed: 'pip install qwix', or keep bfloat16"
        ) from e
    return qwix
