"""The splash kernel of a TPU, run by JAX's interpreter on a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.models import splash as splash_module
from jax_ragrl.models.attention import attention, reads_places, visible_until_mask
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.splash import BLOCK_SIDES, SPLASH_MIN_KEYS, splash
from jax_ragrl.runtime.sharding import make_mesh
from tests.models.gradients import assert_close, value_and_gradients

SIDE = 128
LENGTH = 4 * SIDE


@pytest.fixture(autouse=True)
def _interpret(monkeypatch):
    make_kernel = functools.partial(splash_module.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_module, "make_splash_mha", make_kernel)
    monkeypatch.setattr(splash_module, "BLOCK_SIDES", (SIDE,))


def _trees() -> np.ndarray:
    """Returns places of rows whose subtrees end at blocks, within blocks, and span several.

    The first row has masked, partly visible and visible pairs of blocks, and padding.
    """
    until_BL = np.full((2, LENGTH), LENGTH, np.int32)
    until_BL[0, : 2 * SIDE] = 3 * SIDE + 7
    until_BL[0, 2 * SIDE : 2 * SIDE + 20] = 2 * SIDE + 20
    until_BL[0, 2 * SIDE + 20 : 3 * SIDE + 7] = 3 * SIDE + 7
    until_BL[0, 3 * SIDE + 7 :] = np.arange(3 * SIDE + 8, LENGTH + 1)
    until_BL[1, :40] = SIDE
    until_BL[1, 10:40] = 40
    until_BL[1, 40:SIDE] = SIDE
    until_BL[1, SIDE + 5 : SIDE + 9] = 3 * SIDE
    return until_BL


def _masked_attention(q, k, v, until_BL=None):
    mask_BLL = None if until_BL is None else visible_until_mask(until_BL)
    return attention(q, k, v, mask_BLL, "xla", causal=True)


def _random_qkv(batch: int, heads: int, kv: int):
    rng = np.random.default_rng(0)
    shapes = [(batch, LENGTH, n, 16) for n in (heads, kv, kv)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("rows", [1, 2])
def test_keys_are_visible_up_to_their_places(rows):
    """The heads of a single row share the kernel's tables; with several rows each has its own."""
    args = *_random_qkv(rows, 4, 2), _trees()[:rows]
    assert_close(value_and_gradients(splash, *args), value_and_gradients(_masked_attention, *args))


@pytest.mark.parametrize(("rows", "chunks"), [(1, 4), (2, 4)])
def test_long_rows_attend_in_chunks_of_queries(rows, chunks, monkeypatch):
    args = *_random_qkv(rows, 4, 2), _trees()[:rows]
    expected = value_and_gradients(_masked_attention, *args)
    monkeypatch.setattr(splash_module, "MASK_BYTES", 4 * rows * LENGTH * (LENGTH // chunks))
    assert splash_module._queries_at_a_time(rows, LENGTH) == LENGTH // chunks
    assert_close(value_and_gradients(splash, *args), expected)


def test_the_masks_of_a_chunk_fit_into_a_limit(monkeypatch):
    monkeypatch.setattr(splash_module, "BLOCK_SIDES", BLOCK_SIDES)
    at_a_time = splash_module._queries_at_a_time
    assert at_a_time(1, 16384) == 16384 and at_a_time(2, 16384) == 16384
    assert at_a_time(1, 32768) == 8192 and at_a_time(1, 65536) == 4096
    assert at_a_time(64, 65536) == 512


def test_without_places_attention_is_plain_causal():
    qkv = _random_qkv(2, 4, 2)
    assert_close(
        value_and_gradients(lambda *x: splash(*x, None), *qkv),
        value_and_gradients(_masked_attention, *qkv),
    )


def test_the_kernel_on_a_mesh_equals_attention():
    args = *_random_qkv(2, 4, 2), _trees()
    expected = value_and_gradients(_masked_attention, *args)
    with jax.set_mesh(make_mesh((1, 2, 2), jax.devices()[:4])):
        assert_close(value_and_gradients(splash, *args), expected)


@pytest.mark.parametrize(("batch", "rows"), [(4, 2), (3, 3)])
def test_a_device_gets_its_own_rows_and_heads(batch, rows, monkeypatch):
    """A device gets all rows if they do not divide over the devices."""
    calls = []
    monkeypatch.setattr(splash_module, "_on_device", lambda *x: calls.append(x) or x[0])
    with jax.set_mesh(make_mesh((1, 2, 2), jax.devices()[:4])):
        until_BL = np.full((batch, LENGTH), LENGTH, np.int32)
        out = jax.eval_shape(splash, *_random_qkv(batch, 4, 2), until_BL)
    queries, keys = ((rows, LENGTH, heads, 16) for heads in (2, 1))
    assert [x.shape for x in calls[-1]] == [queries, keys, keys, (rows, LENGTH)]
    assert out.shape == (batch, LENGTH, 4, 16)


def test_pairs_without_a_load_repeat_the_last_number():
    until_BL = jnp.asarray(_trees()[:1])
    forward = jax.device_get(splash_module._mask_info(until_BL, 4, by_key=False))
    kinds = [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [1, 1, 1, 1]]
    assert forward.block_mask.shape == (1, 4, 4)  # the four heads of one row share the tables
    assert forward.block_mask[0].tolist() == kinds
    assert forward.data_next[0].tolist() == [[0] * 4, [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]]
    assert forward.mask_next[0].tolist() == [[0] * 4, [0, 2, 2, 2], [0, 0, 5, 5], [6, 7, 8, 9]]
    assert forward.partial_mask_blocks.shape == (10, SIDE, SIDE)
    # By key the kernel visits the blocks of queries.
    back = jax.device_get(splash_module._mask_info(until_BL, 4, by_key=True))
    assert back.block_mask[0].tolist() == kinds
    assert back.data_next[0].tolist() == [[0] * 4, [1, 1, 0, 0], [2, 2, 2, 0], [3] * 4]
    assert back.mask_next[0].tolist() == [[0] * 4, [0, 2, 0, 0], [0, 2, 5, 0], [6, 7, 8, 9]]


def test_a_range_that_ends_at_a_block_boundary_is_exclusive():
    info = splash_module._mask_info(jnp.asarray(_trees()[1:]), 1, by_key=False)
    kinds = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 2, 1, 0], [0, 1, 2, 1]]
    assert jax.device_get(info.block_mask)[0].tolist() == kinds
    early_BL = jnp.full((1, 2 * SIDE), 2 * SIDE - 1, jnp.int32).at[:, -1].set(2 * SIDE)
    info = splash_module._mask_info(early_BL, 1, by_key=False)
    assert jax.device_get(info.block_mask)[0].tolist() == [[1, 0], [1, 1]]  # but for the last query


def test_numbers_of_many_masks_do_not_overflow():
    """The last of 129 masks has number 128, which exceeds a signed byte."""
    until_BL = jnp.full((43, 2 * SIDE), 2 * SIDE, jnp.int32)
    number_BIJ = jax.device_get(splash_module._mask_info(until_BL, 1, by_key=False).mask_next)
    assert number_BIJ.min() == 0 and number_BIJ.max() == 3 * 43 - 1


@pytest.mark.parametrize(
    ("impl", "length", "kv_heads", "expected"),
    [
        ("splash", SPLASH_MIN_KEYS, 2, True),
        ("splash", SPLASH_MIN_KEYS + 8, 2, False),
        ("splash", SPLASH_MIN_KEYS // 2, 2, False),
        ("splash", SPLASH_MIN_KEYS, 1, False),
        ("auto", SPLASH_MIN_KEYS, 2, False),
        ("xla", SPLASH_MIN_KEYS, 2, False),
    ],
)
def test_splash_runs_if_it_is_named_and_fits(impl, length, kv_heads, expected):
    """On a CPU `auto` takes another kernel; two devices cannot share one key-value head."""
    with jax.set_mesh(make_mesh((1, 4, 2))):
        assert reads_places(impl, length, kv_heads) == expected


@pytest.mark.parametrize("changes", [{}, {"sliding_layers": (0,), "sliding_window": 30}])
def test_a_decoder_takes_places_or_a_mask(monkeypatch, changes):
    """Sliding layers need a mask, so places are converted to one."""
    monkeypatch.setattr(splash_module, "SPLASH_MIN_KEYS", LENGTH)
    ids_BL, positions_BL = np.ones((2, 2, LENGTH), np.int32) * np.arange(LENGTH, dtype=np.int32)
    until_BL = _trees()

    def hidden(impl: str):
        config = DecoderConfig(64, 32, 48, 2, 4, 2, 8, attention_impl=impl, **changes)
        graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
        return jax.jit(lambda params, *x: nnx.merge(graph, params)(*x)[0])(
            params, ids_BL, positions_BL, until_BL
        )

    actual, expected = jax.device_get((hidden("splash"), hidden("xla")))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
