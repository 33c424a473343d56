"""The splash kernel, interpreted: what a TPU compiles, computed by a CPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.models import splash as splash_module
from jax_ragrl.models.attention import attention, prefix_mask, reads_places
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.splash import SIDES, SPLASH_FROM, splash, splash_takes
from jax_ragrl.runtime.sharding import make_mesh

SIDE = 128
LENGTH = 4 * SIDE


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    interpreted = functools.partial(splash_module.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_module, "make_splash_mha", interpreted)
    monkeypatch.setattr(splash_module, "SIDES", (SIDE,))


def _trees() -> np.ndarray:
    """Rows of trees whose parts begin and end at blocks, within them, and over several; the first
    has pairs of blocks that show nothing, something and all, and padding."""
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


def _outcome(attend, *arrays):
    """Output and gradients."""

    def total(*arrays):
        out = attend(*arrays)
        return jnp.sum(jnp.sin(out)), out

    grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return jax.device_get((out, *grads))


def _by_mask(q, k, v, until_BL=None):
    mask_BLL = None if until_BL is None else prefix_mask(until_BL)
    return attention(q, k, v, mask_BLL, "xla", causal=True)


def _drawn(batch: int, heads: int, kv: int):
    rng = np.random.default_rng(0)
    shapes = [(batch, LENGTH, n, 16) for n in (heads, kv, kv)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [1, 2])
def test_keys_are_seen_up_to_their_places(rows):
    """Heads of one row share what the kernel is told; those of several have their row's."""
    given = *_drawn(rows, 4, 2), _trees()[:rows]
    assert_close(_outcome(splash, *given), _outcome(_by_mask, *given))


def test_without_places_everything_before_is_seen():
    qkv = _drawn(2, 4, 2)
    assert_close(_outcome(lambda *x: splash(*x, None), *qkv), _outcome(_by_mask, *qkv))


def test_on_a_mesh_each_device_takes_its_rows_and_heads():
    given = *_drawn(2, 4, 2), _trees()
    expected = _outcome(_by_mask, *given)
    with jax.set_mesh(make_mesh((1, 2, 2), jax.devices()[:4])):
        assert_close(_outcome(splash, *given), expected)


@pytest.mark.parametrize(("batch", "rows"), [(4, 2), (3, 3)])
def test_on_a_mesh_the_kernel_is_given_the_rows_and_heads_of_one_device(batch, rows, monkeypatch):
    """And all rows where they do not divide."""
    seen = []
    monkeypatch.setattr(splash_module, "_on_device", lambda *x: seen.append(x) or x[0])
    with jax.set_mesh(make_mesh((1, 2, 2), jax.devices()[:4])):
        until_BL = np.full((batch, LENGTH), LENGTH, np.int32)
        out = jax.eval_shape(splash, *_drawn(batch, 4, 2), until_BL)
    queries, keys = ((rows, LENGTH, heads, 16) for heads in (2, 1))
    assert [x.shape for x in seen[-1]] == [queries, keys, keys, (rows, LENGTH)]
    assert out.shape == (batch, LENGTH, 4, 16)


def test_a_row_is_cut_into_the_largest_blocks_that_divide_it(monkeypatch):
    monkeypatch.setattr(splash_module, "SIDES", SIDES)
    lengths = (1536, 1280, 1152)
    assert [splash_module._side(length) for length in lengths] == [512, 256, 128]
    assert all(splash_takes(length, 1) for length in lengths) and not splash_takes(1152 + 64, 1)


def test_pairs_of_blocks_that_need_nothing_keep_what_was_read():
    until_BL = jnp.asarray(_trees()[:1])
    forward = jax.device_get(splash_module._blocks(until_BL, 4, by_key=False))
    kinds = [[1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0], [1, 1, 1, 1]]
    assert forward.block_mask.shape == (1, 4, 4)  # the four heads of one row share what is told
    assert forward.block_mask[0].tolist() == kinds
    assert forward.data_next[0].tolist() == [[0] * 4, [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]]
    assert forward.mask_next[0].tolist() == [[0] * 4, [0, 2, 2, 2], [0, 0, 5, 5], [6, 7, 8, 9]]
    assert forward.partial_mask_blocks.shape == (10, SIDE, SIDE)
    # By key it goes down the blocks of queries.
    back = jax.device_get(splash_module._blocks(until_BL, 4, by_key=True))
    assert back.block_mask[0].tolist() == kinds
    assert back.data_next[0].tolist() == [[0] * 4, [1, 1, 0, 0], [2, 2, 2, 0], [3] * 4]
    assert back.mask_next[0].tolist() == [[0] * 4, [0, 2, 0, 0], [0, 2, 5, 0], [6, 7, 8, 9]]


def test_what_ends_where_a_block_begins_shows_it_nothing_and_all_of_the_one_before():
    info = splash_module._blocks(jnp.asarray(_trees()[1:]), 1, by_key=False)
    kinds = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 2, 1, 0], [0, 1, 2, 1]]
    assert jax.device_get(info.block_mask)[0].tolist() == kinds
    early_BL = jnp.full((1, 2 * SIDE), 2 * SIDE - 1, jnp.int32).at[:, -1].set(2 * SIDE)
    info = splash_module._blocks(early_BL, 1, by_key=False)
    assert jax.device_get(info.block_mask)[0].tolist() == [[1, 0], [1, 1]]  # but for the last query


def test_the_masks_of_many_rows_are_numbered_without_a_wrap():
    """129 masks: the last has number 128, which a signed byte does not hold."""
    until_BL = jnp.full((43, 2 * SIDE), 2 * SIDE, jnp.int32)
    number_BIJ = jax.device_get(splash_module._blocks(until_BL, 1, by_key=False).mask_next)
    assert number_BIJ.min() == 0 and number_BIJ.max() == 3 * 43 - 1


@pytest.mark.parametrize(
    ("impl", "length", "kv_heads", "reads"),
    [
        ("splash", SPLASH_FROM, 2, True),
        ("splash", SPLASH_FROM + 8, 2, False),
        ("splash", SPLASH_FROM // 2, 2, False),
        ("splash", SPLASH_FROM, 1, False),
        ("auto", SPLASH_FROM, 2, False),
        ("xla", SPLASH_FROM, 2, False),
    ],
)
def test_places_are_read_where_the_kernel_fits_and_is_named(impl, length, kv_heads, reads):
    """On a CPU `auto` takes another; two devices cannot share one key-value head."""
    with jax.set_mesh(make_mesh((1, 4, 2))):
        assert reads_places(impl, length, kv_heads) == reads


@pytest.mark.parametrize("changes", [{}, {"sliding_layers": (0,), "sliding_window": 30}])
def test_a_decoder_told_places_is_one_told_a_mask(monkeypatch, changes):
    """The layers that slide need a mask, which they make of places."""
    monkeypatch.setattr(splash_module, "SPLASH_FROM", LENGTH)
    ids_BL, positions_BL = np.ones((2, 2, LENGTH), np.int32) * np.arange(LENGTH, dtype=np.int32)
    until_BL = _trees()

    def hidden(impl: str):
        config = DecoderConfig(64, 32, 48, 2, 4, 2, 8, attention_impl=impl, **changes)
        graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
        return jax.jit(lambda params, *x: nnx.merge(graph, params)(*x)[0])(
            params, ids_BL, positions_BL, until_BL
        )

    found, expected = jax.device_get((hidden("splash"), hidden("xla")))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
