"""The Triton kernel of prefix trees, run by JAX's interpreter on a CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.models import attention as attention_module
from jax_ragrl.models import tree_kernel as module
from jax_ragrl.models.attention import attention, reads_places, visible_until_mask
from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.tree_kernel import SIDE, tree_attention, tree_kernel_supports
from jax_ragrl.runtime.sharding import make_mesh, mesh_context, replicate
from jax_ragrl.runtime.topology import describe_devices
from tests.models.gradients import assert_close, value_and_gradients

LENGTH = 4 * SIDE


def random_tree(rng: np.random.Generator, start: int, end: int, until_L: np.ndarray) -> None:
    """Fills in the places of a tree of random shape: a node, then its children one by one."""
    node = int(rng.integers(1, max(2, (end - start) // 2)))
    until_L[start : start + node] = end
    child = start + node
    while child < end:
        size = int(rng.integers(1, end - child + 1))
        random_tree(rng, child, child + size, until_L)
        child += size


def places(rows: int) -> np.ndarray:
    """Returns the places of two trees per row, int32 `[rows, LENGTH]`, and of padding."""
    rng = np.random.default_rng(1)
    until_BL = np.tile(np.arange(1, LENGTH + 1, dtype=np.int32), (rows, 1))
    for until_L in until_BL:
        split, end = np.sort(rng.integers(2, LENGTH, 2))
        random_tree(rng, 0, int(split), until_L)
        random_tree(rng, int(split), int(end), until_L)
    return until_BL


def queries_keys_values(rows: int, heads: int, kv: int, width: int = 16) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = [(rows, LENGTH, n, width) for n in (heads, kv, kv)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def dense(q, k, v, until_BL):
    return attention(q, k, v, visible_until_mask(until_BL), "xla", causal=True)


@pytest.mark.parametrize(("heads", "kv", "width"), [(4, 4, 16), (4, 2, 32), (3, 1, 16)])
def test_trees_equal_dense_attention(heads: int, kv: int, width: int):
    arrays = jax.device_put((*queries_keys_values(3, heads, kv, width), places(3)))
    assert_close(value_and_gradients(tree_attention, *arrays), value_and_gradients(dense, *arrays))


def test_without_places_it_is_causal_attention():
    arrays = jax.device_put(queries_keys_values(2, 4, 2))
    actual = value_and_gradients(lambda *x: attention(*x, None, "triton", causal=True), *arrays)
    expected = value_and_gradients(lambda *x: attention(*x, None, "xla", causal=True), *arrays)
    assert_close(actual, expected)


def test_pairs_of_blocks_without_a_visible_pair_are_not_visited():
    until_BL = np.full((1, LENGTH), LENGTH, np.int32)
    until_BL[0, SIDE : 2 * SIDE] = 2 * SIDE  # a sibling, which the following blocks do not see
    until_BL[0, 2 * SIDE : 3 * SIDE] = 3 * SIDE + 1  # only the first query of the last block does
    numbers, count = jax.device_get(module._visits(jnp.asarray(until_BL), by_key=False))
    visits = [numbers[0, i, : count[0, i]].tolist() for i in range(4)]
    assert visits == [[0], [0, 1], [0, 2], [0, 2, 3]]
    numbers, count = jax.device_get(module._visits(jnp.asarray(until_BL), by_key=True))
    visits = [numbers[0, j, : count[0, j]].tolist() for j in range(4)]
    assert visits == [[0, 1, 2, 3], [1], [2, 3], [3]]


def test_heads_are_split_over_a_mesh():
    arrays = (*queries_keys_values(4, 4, 2), places(4))
    expected = value_and_gradients(dense, *jax.device_put(arrays))
    mesh = make_mesh((2, 2, 2))
    with mesh_context(mesh):
        actual = value_and_gradients(tree_attention, *replicate(arrays, mesh))
    assert_close(actual, expected)


def test_a_decoder_hands_its_places_to_the_kernel(monkeypatch: pytest.MonkeyPatch):
    config = DecoderConfig(64, 64, 64, 2, 4, 2, 16, attention_impl="triton")
    ids = np.random.default_rng(0).integers(64, size=(2, LENGTH)).astype(np.int32)
    position = np.tile(np.arange(LENGTH, dtype=np.int32), (2, 1))
    arrays = jax.device_put((ids, position, places(2)))

    def hidden(impl: str) -> np.ndarray:
        own = dataclasses.replace(config, attention_impl=impl)
        decoder = Decoder(own, rngs=nnx.Rngs(0))
        return jax.device_get(decoder(*arrays)[0])

    expected, calls = hidden("xla"), []
    attend = attention_module.tree_attention
    monkeypatch.setattr(
        attention_module, "tree_attention", lambda *x: calls.append(x[3].ndim) or attend(*x)
    )
    np.testing.assert_allclose(hidden("triton"), expected, atol=1e-4)
    assert calls and {*calls} == {2}


def test_other_rows_have_a_mask():
    assert reads_places("triton", LENGTH, 64, 2)
    assert not reads_places("auto", LENGTH, 64, 2)
    assert not tree_kernel_supports(LENGTH + 1, 64, 2) and not tree_kernel_supports(LENGTH, 80, 2)
    with mesh_context(make_mesh((2, 1, 4))):
        assert not tree_kernel_supports(LENGTH, 64, 2)


def test_a_gpu_has_no_array_of_pairs():
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("a CUDA plugin describes GPUs; the lock for tests has none")
    mesh = make_mesh((1, 1, 1), describe_devices("h100:1"))
    on_gpu = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [(1, 8192, n, 64) for n in (14, 2, 2)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=on_gpu) for shape in shapes]
    until_BL = jax.ShapeDtypeStruct((1, 8192), jnp.int32, sharding=on_gpu)

    def total(*arrays):
        return jnp.sum(tree_attention(*arrays).astype(jnp.float32))

    with mesh_context(mesh):
        gradient = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
        compiled = gradient.lower(*arrays, until_BL).compile()
    assert compiled.as_text().count("__gpu$xla.gpu.triton") == 3
    assert not re.search(r"\b8192,8192\b", compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < 8192 * 8192
