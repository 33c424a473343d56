"""Eight-bit weights for a decoder that only generates: the frozen language model.

A projection is kept as int8 with one scale an output channel, by Qwix, and widened where it is
multiplied, which XLA fuses into the product: about half the memory of bfloat16. Embeddings, norms
and biases stay as they are. Neither training nor saving is meant.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from jax_ragrl.errors import UserError
from jax_ragrl.models.decoder import Decoder, layer_weights
from jax_ragrl.models.hf import layout_of


def quantize_decoder(decoder: Decoder) -> Decoder:
    """`decoder` with int8 projections; the original is left alone.

    Raises `UserError` where Qwix is not installed, or the decoder carries an adapter.
    """
    if decoder.adapter is not None:
        raise UserError(
            "this decoder carries an adapter: merge_lora it before its weights are int8"
        )
    params = decoder.params()
    layers = dict(params["layers"])
    for name, weight in layer_weights(decoder.config).items():
        if inputs := layout_of(name, weight).inputs:
            layers[name] = _quantize(layers[name], inputs)
    return Decoder.from_params(decoder.config, params | {"layers": layers})


def _quantize(stack: Array, inputs: int) -> Any:
    """A stacked kernel `[layers, in..., out...]` with a float32 scale a layer and output."""
    try:
        import qwix
    except ImportError as e:
        raise UserError("int8 weights need Qwix: 'pip install qwix', or keep bfloat16") from e
    outputs = tuple(range(1 + inputs, stack.ndim))
    return qwix.quantize(stack, jnp.int8, channelwise_axes=(0, *outputs), scale_dtype=jnp.float32)
