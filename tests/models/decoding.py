"""Computations with a decoder that several tests need, compiled once per shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hf_reference import positions_of
from jax import Array

from jax_ragrl.models.config import DecoderConfig, Weight, weights
from jax_ragrl.models.decoder import Decoder, causal_mask, init_cache
from jax_ragrl.models.hf import stored_tensors


def random_decoder(config: DecoderConfig, seed: int = 0) -> Decoder:
    """A decoder whose parameters all matter, initialized on the host: nothing to compile."""
    rng, dtype = np.random.default_rng(seed), np.dtype(config.param_dtype)

    def draw(weight: Weight) -> np.ndarray:
        std = weight.std or 0.3
        return (weight.fill + std * rng.normal(size=weight.shape)).astype(dtype)

    table = jax.tree.map(draw, weights(config), is_leaf=lambda x: isinstance(x, Weight))
    return Decoder.from_params(config, jax.device_put(table))


@functools.partial(jax.jit, static_argnums=0)
def _call(graphdef, state, *args):
    return nnx.merge(graphdef, state)(*args)


def call(module: nnx.Module, *args):
    return _call(*nnx.split(module), *args)


def _forward(graphdef, state, ids_BL: Array, mask_BL: Array, positions_BL: Array) -> Array:
    decoder = nnx.merge(graphdef, state)
    hidden_BLD, _ = decoder(ids_BL, positions_BL, causal_mask(mask_BL.astype(jnp.int32)))
    return decoder.logits(hidden_BLD)


_logits = jax.jit(_forward, static_argnums=0)


def logits(decoder: Decoder, ids_BL: np.ndarray, mask_BL: np.ndarray | None = None) -> np.ndarray:
    """Returns the logits `[B, L, V]` of one forward pass without a cache."""
    mask_BL = np.ones(ids_BL.shape, bool) if mask_BL is None else mask_BL
    graphdef, state = nnx.split(decoder)
    return jax.device_get(_logits(graphdef, state, ids_BL, mask_BL, positions_of(mask_BL)))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _greedy(graphdef, state, ids_BL: Array, mask_BL: Array, num_tokens: int) -> Array:
    """Prefills prompts padded on the left, then decodes; slot and position of a token differ."""
    decoder = nnx.merge(graphdef, state)
    batch, length = ids_BL.shape
    slots_1S = jnp.arange(length + num_tokens, dtype=jnp.int32)[None]
    pads_B1 = length - jnp.sum(mask_BL, axis=1, dtype=jnp.int32, keepdims=True)
    key_positions_BS = jnp.maximum(slots_1S - pads_B1, 0)

    def likeliest(hidden_BTD):
        return jnp.argmax(decoder.logits(hidden_BTD[:, -1]), axis=-1).astype(jnp.int32)

    def step(carry, i):
        cache, last_B = carry
        mask_BS = (slots_1S >= pads_B1) & (slots_1S <= length + i)
        at_B1, write_B = length + i - pads_B1, jnp.broadcast_to(i, (batch,))
        visible = mask_BS[:, None], cache, write_B, key_positions_BS
        hidden_BTD, cache = decoder(last_B[:, None], at_B1, *visible)
        return (cache, likeliest(hidden_BTD)), last_B

    prompt = ids_BL, key_positions_BS[:, :length], causal_mask(mask_BL.astype(jnp.int32))
    hidden_BLD, prefix = decoder(*prompt, return_cache=True)
    first = (
        init_cache(decoder.config, batch, num_tokens)._replace(prefix=prefix),
        likeliest(hidden_BLD),
    )
    return jax.lax.scan(step, first, jnp.arange(num_tokens, dtype=jnp.int32))[1].T


def greedy(decoder, ids_BL, mask_BL, num_tokens) -> np.ndarray:
    graphdef, state = nnx.split(decoder)
    return jax.device_get(_greedy(graphdef, state, ids_BL, mask_BL, num_tokens))


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(graphdef, state, ids_BL: Array, mask_BL: Array, positions_BL: Array):
    def mean_logp(state):
        logits_BLV = _forward(graphdef, state, ids_BL, mask_BL, positions_BL)
        logp_BLV = jax.nn.log_softmax(logits_BLV[:, :-1])
        token_BL = jnp.take_along_axis(logp_BLV, ids_BL[:, 1:, None], axis=-1)[..., 0]
        real_BL = mask_BL[:, 1:] & mask_BL[:, :-1]
        return jnp.sum(token_BL, where=real_BL) / jnp.sum(real_BL, dtype=jnp.float32), logits_BLV

    return jax.grad(mean_logp, has_aux=True)(state)


def evaluate(decoder, ids_BL, mask_BL) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the gradient of the mean log-probability by checkpoint name, and the logits."""
    graphdef, state = nnx.split(decoder)
    grads, logits_BLV = _evaluate(graphdef, state, ids_BL, mask_BL, positions_of(mask_BL))
    params = jax.device_get(nnx.merge(graphdef, grads).params())
    by_name = {
        stored: layout.to_stored(params[n] if layer is None else params["layers"][n][layer])
        for stored, n, layer, layout in stored_tensors(decoder.config)
    }
    return by_name, jax.device_get(logits_BLV)
