"""Attention of decoded rows: both implementations equal dense attention over both parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.models import prefix_attention as module
from jax_ragrl.models.attention import dense_attention
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder, init_cache
from jax_ragrl.models.prefix_attention import (
    KEYS_IN_TURN,
    VisibleKeys,
    prefix_attention,
    uses_decode_kernel,
)
from jax_ragrl.runtime.sharding import make_mesh, replicate

CONFIG = DecoderConfig(64, 64, 64, 1, 4, 2, 16, dtype="bfloat16")


def decode_args(width, dtype=np.float32, *, prompts=2, prefix=24, own=8, head_dim=4):
    """Arguments of `prefix_attention` for one token of `width` siblings per prompt."""
    rows = prompts * width
    shapes = [(rows, 1, 4, head_dim)]
    shapes += 2 * [(prompts, 2, prefix, head_dim)] + 2 * [(rows, 2, own, head_dim)]
    rng = np.random.default_rng(0)
    q, k0, v0, k1, v1 = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    mask = rng.random((rows, 1, prefix + own)) < 0.5
    mask[..., 0] = True
    return q, (k0, v0), (k1, v1), mask


def visible_keys(counts, width, own):
    """The keys that rows see: `counts` per prompt, and the first 1, 2, ... of their own."""
    rows = len(counts) * width
    own_B = 1 + np.arange(rows, dtype=np.int32) % own
    return VisibleKeys(np.repeat(np.array(counts, np.int32), width), own_B)


def dense(q, prefix_kv, own_kv, mask, width):
    """`attention` over the concatenation of both parts."""
    keys_values = [
        jnp.swapaxes(jnp.concatenate([jnp.repeat(b, width, axis=0), o], axis=2), 1, 2)
        for b, o in zip(prefix_kv, own_kv, strict=True)
    ]
    return dense_attention(q, *keys_values, mask)


@pytest.mark.parametrize("width", [1, 3])
def test_both_parts_together_are_attention(width):
    arguments = jax.device_put(decode_args(width))
    actual = jax.jit(prefix_attention)(*arguments)
    expected = dense(*arguments, width)
    np.testing.assert_allclose(*jax.device_get((actual, expected)), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("width", "barriers"), [(1, 1), (2, 0)])
def test_a_barrier_separates_the_matmuls_of_a_single_sibling(width, barriers):
    jaxpr = str(jax.make_jaxpr(prefix_attention)(*decode_args(width)))
    assert jaxpr.count("optimization_barrier") == barriers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "prefix", "own", "counts"),
    [
        (1, 48, 16, (48, 5)),
        (3, 48, 32, (17, 0)),  # a prompt of padding has no keys
        (9, 64, 64, (64, 1)),  # more queries than a block of heads
        (2, 2 * KEYS_IN_TURN, 16, (KEYS_IN_TURN + 3, KEYS_IN_TURN)),  # two parts in parallel
    ],
)
def test_the_kernel_is_attention_to_the_first_keys(width, prefix, own, counts):
    args = decode_args(width, jnp.bfloat16, prefix=prefix, own=own, head_dim=16)
    *arrays, visible = jax.device_put((*args[:3], visible_keys(counts, width, own)))
    actual = jax.jit(prefix_attention)(*arrays, visible)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    expected = dense(*wide, visible.mask(prefix, own), width)
    assert actual.dtype == jnp.bfloat16
    # bfloat16 has 8 bits, and values are at most 4.
    actual, expected = jax.device_get((actual.astype(jnp.float32), expected))
    np.testing.assert_allclose(actual, expected, atol=0.03)


@pytest.mark.parametrize("prompts", [4, 3])
def test_on_a_mesh_each_device_runs_the_kernel_on_its_rows_and_heads(prompts):
    """Four prompts divide over four devices; three are on all devices."""
    width, prefix, own = 2, 32, 16
    args = decode_args(width, jnp.bfloat16, prompts=prompts, prefix=prefix, own=own, head_dim=16)
    visible = visible_keys((20, 9, 32, 1)[:prompts], width, own)
    arguments, mesh = (*args[:3], visible), make_mesh((2, 2, 2))
    alone = jax.jit(prefix_attention)(*jax.device_put(arguments))
    with jax.set_mesh(mesh):
        on_mesh = jax.jit(prefix_attention)(*replicate(arguments, mesh))
    pair = jax.device_get((on_mesh, alone))
    np.testing.assert_allclose(*(x.astype(np.float32) for x in pair), atol=0.01)


@pytest.mark.parametrize(
    ("changes", "slots", "fits"),
    [
        ({}, (1024, 64), True),
        ({"attention_impl": "xla"}, (1024, 64), False),
        ({"dtype": "float32"}, (1024, 64), False),
        ({"head_dim": 80}, (1024, 64), False),
        ({"sliding_layers": (0,), "sliding_window": 8}, (1024, 64), False),
        ({}, (1000, 64), False),
        ({}, (1024, 24), False),
    ],
)
def test_what_the_kernel_takes(monkeypatch, changes, slots, fits):
    config = dataclasses.replace(CONFIG, **changes)
    assert not uses_decode_kernel(config, *slots), "a CPU has no such kernel"
    monkeypatch.setattr(module, "on_cuda", lambda: True)
    assert uses_decode_kernel(config, *slots) == fits
    with jax.set_mesh(make_mesh((1, 2, 4))):
        assert not uses_decode_kernel(config, *slots), "four devices cannot split two heads"


@pytest.mark.slow
def test_a_decoder_takes_the_kernel_for_visible_keys(monkeypatch):
    """One token for each of two siblings of two prompts: by the kernel, and by XLA with a mask."""
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(0))
    ids, length = jax.device_put((np.arange(32, dtype=np.int32).reshape(2, 16), np.array([16, 9])))
    positions = jnp.broadcast_to(jnp.arange(16)[None], (2, 16))
    _, prefix = decoder(ids, positions, None, return_cache=True)

    def hidden() -> np.ndarray:
        at_B = jnp.repeat(length, 2).astype(jnp.int32)
        visible = VisibleKeys(at_B, jnp.ones_like(at_B))
        cache = init_cache(CONFIG, 4, 16)._replace(prefix=prefix)
        out, _ = decoder(at_B[:, None], at_B[:, None], visible, cache, jnp.zeros_like(at_B))
        return np.asarray(jax.device_get(out), np.float32)

    by_xla = hidden()
    monkeypatch.setattr(module, "on_cuda", lambda: True)
    calls = []
    attend = module._attend
    monkeypatch.setattr(module, "_attend", lambda *x: calls.append(1) or attend(*x))
    np.testing.assert_allclose(hidden(), by_xla, atol=0.03)
    assert len(calls) == 2 * CONFIG.num_layers
