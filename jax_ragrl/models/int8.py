"""Eight-bit weights for a decoder that only generates: the frozen language model.

A projection is kept as int8 with one scale an output channel, by Qwix, and widened where it is
multiplied, one layer at a time: half the memory of bfloat16. Embeddings, norms and biases stay as
they are. Neither training nor saving is meant.
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
    """`decoder` with int8 projections; the original is left alone.

    Raises `UserError` where Qwix is not installed, or the decoder carries an adapter.
    """
    if decoder.adapter is not None:
        raise UserError(
            "this decoder carries an adapter: merge_lora it before its weights are int8"
        )
    _qwix()  # asked before the work
    params = decoder.params()
    layers = dict(params["layers"])
    for name, weight in layer_weights(decoder.config).items():
        if inputs := layout_of(name, weight).inputs:
            layers[name] = _quantize(layers[name], inputs)
    return Decoder.from_params(decoder.config, params | {"layers": layers})


@functools.partial(jax.jit, static_argnums=1)
def _quantize(stack: Array, inputs: int) -> Any:
    """A stacked kernel `[layers, in..., out...]` with a float32 scale a layer and output."""
    channels = (0, *range(1 + inputs, stack.ndim))
    return _qwix().quantize(stack, jnp.int8, channelwise_axes=channels, scale_dtype=jnp.float32)


def _qwix() -> Any:
    try:
        import qwix
    except ImportError as e:
        raise UserError("int8 weights need Qwix: 'pip install qwix', or keep bfloat16") from e
    return qwix
