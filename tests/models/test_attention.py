"""Implementations of attention agree, and `auto` chooses the right one."""

import importlib.util
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.models.attention import (
    CUDNN_MIN_KEYS,
    MAX_BLOCK_SIDE,
    MIN_QUERY_BLOCK,
    attention,
    cudnn_supports,
    shared_prefix_attention,
)
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.runtime.topology import describe_devices


@pytest.mark.parametrize("impl", ["xla", "blockwise"])
@pytest.mark.parametrize("length", [4 * MAX_BLOCK_SIDE, 3 * MIN_QUERY_BLOCK + 1])
def test_causal_attention_in_blocks_equals_dense_attention(length, impl):
    """Values and gradients, under a mask that hides every later key and many earlier ones. Some
    pairs of blocks are entirely masked, and some queries attend within their own block only."""
    rng = np.random.default_rng(0)
    mask = np.tril(rng.random((2, length, length)) < 0.5) | np.eye(length, dtype=bool)
    mask[:, MAX_BLOCK_SIDE:, :MAX_BLOCK_SIDE] = False
    mask[1, 2 * MAX_BLOCK_SIDE + 5 :, : 2 * MAX_BLOCK_SIDE] = False
    q, k, v = (rng.normal(size=(2, length, n, 4)).astype(np.float32) for n in (4, 2, 2))

    def value_and_gradients(causal: bool):
        def total(q, k, v, mask):
            out = attention(q, k, v, mask, impl, causal=causal)
            return jnp.sum(jnp.sin(out)), out

        grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(
            *jax.device_put((q, k, v, mask))
        )
        return jax.device_get((out, *grads))

    pairs = zip(value_and_gradients(True), value_and_gradients(False), strict=True)
    for actual, expected in pairs:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)


def test_blockwise_is_the_default_on_a_cpu_only():
    """A named implementation wins: a program for another device may be compiled on a CPU."""
    q, k = jnp.zeros((1, 2 * MAX_BLOCK_SIDE, 2, 4)), jnp.zeros((1, 2 * MAX_BLOCK_SIDE, 1, 4))
    mask = jnp.tril(jnp.ones((1, 2 * MAX_BLOCK_SIDE, 2 * MAX_BLOCK_SIDE), bool))

    def jaxpr(impl: str) -> str:
        return str(jax.make_jaxpr(lambda *x: attention(*x, impl, causal=True))(q, k, k, mask))

    assert "custom_vjp" in jaxpr("auto") and "custom_vjp" in jaxpr("blockwise")
    assert "custom_vjp" not in jaxpr("xla")


@pytest.mark.parametrize(("shape", "fits"), [((2, 2, 2), True), ((1, 2, 4), False)])
def test_cudnn_needs_heads_that_the_tensor_axis_splits(shape, fits):
    """cuDNN raises if the axis splits four query heads but not two key-value heads."""
    q, k = (jax.ShapeDtypeStruct((8, CUDNN_MIN_KEYS, n, 64), jnp.bfloat16) for n in (4, 2))
    assert cudnn_supports(q, k)
    with jax.set_mesh(make_mesh(shape)):
        assert cudnn_supports(q, k) == fits


@pytest.mark.parametrize(
    ("version", "capability", "supported"),
    [
        ("cuda 13", "8.0", True),
        ("cuda 12", "12.0", True),
        ("cuda 12", "7.5", False),
        ("rocm", "gfx942", False),
    ],
)
def test_cudnn_runs_on_gpus_that_it_supports(monkeypatch, version, capability, supported):
    client = types.SimpleNamespace(platform_version=version)
    gpu = types.SimpleNamespace(client=client, compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    calls = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda q, *_, **options: calls.append(options) or q
    )
    heads = jax.ShapeDtypeStruct((1, CUDNN_MIN_KEYS, 2, 64), jnp.bfloat16)
    jax.eval_shape(lambda *x: attention(*x, None, causal=True), heads, heads, heads)
    assert [options["implementation"] for options in calls] == ["cudnn"] * supported


@pytest.mark.parametrize("impl", ["xla", "blockwise"])
def test_causal_attention_without_a_mask_is_lower_triangular(impl):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 2 * MAX_BLOCK_SIDE, n, 4)).astype(np.float32) for n in (4, 2, 2))
    mask = np.tril(np.ones((2, 2 * MAX_BLOCK_SIDE, 2 * MAX_BLOCK_SIDE), bool))
    without_mask = jax.jit(lambda *x: attention(*x, None, impl, causal=True))
    with_mask = jax.jit(lambda *x: attention(*x, impl))
    actual = without_mask(*jax.device_put((q, k, v)))
    expected = with_mask(*jax.device_put((q, k, v, mask)))
    np.testing.assert_allclose(*jax.device_get((actual, expected)), rtol=1e-5, atol=2e-6)


def decode_args(width, dtype=np.float32, *, prompts=2, prefix=24, own=8, head_dim=4):
    """Arguments of `shared_prefix_attention` for one token of `width` siblings per prompt."""
    rows = prompts * width
    shapes = [(rows, 1, 4, head_dim)]
    shapes += 2 * [(prompts, 2, prefix, head_dim)] + 2 * [(rows, 2, own, head_dim)]
    rng = np.random.default_rng(0)
    q, k0, v0, k1, v1 = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    mask = rng.random((rows, 1, prefix + own)) < 0.5
    mask[..., 0] = True
    return q, (k0, v0), (k1, v1), mask


@pytest.mark.parametrize("width", [1, 3])
def test_shared_prefix_attention_is_attention_over_both_parts(width):
    q, prefix_kv, own_kv, mask = jax.device_put(decode_args(width))
    keys_values = [
        jnp.swapaxes(jnp.concatenate([jnp.repeat(b, width, axis=0), o], axis=2), 1, 2)
        for b, o in zip(prefix_kv, own_kv, strict=True)
    ]
    actual = jax.jit(shared_prefix_attention)(q, prefix_kv, own_kv, mask)
    expected = attention(q, *keys_values, mask)
    np.testing.assert_allclose(*jax.device_get((actual, expected)), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("width", "barriers"), [(1, 1), (2, 0)])
def test_a_barrier_separates_the_matmuls_of_a_single_sibling(width, barriers):
    jaxpr = str(jax.make_jaxpr(shared_prefix_attention)(*decode_args(width)))
    assert jaxpr.count("optimization_barrier") == barriers


@pytest.mark.parametrize("width", [1, 2])
def test_a_gpu_does_not_concatenate_the_keys_of_both_parts(width):
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("a CUDA plugin describes GPUs; the lock for tests has none")
    prefix, own = 512, 128
    arrays = decode_args(width, jnp.bfloat16, prefix=prefix, own=own, head_dim=64)
    on_gpu = jax.sharding.SingleDeviceSharding(describe_devices("h100:1")[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_gpu), arrays)
    hlo = jax.jit(shared_prefix_attention).lower(*shapes).compile().as_text()
    assert re.search(rf"bf16\[[0-9,]*\b{prefix}\b", hlo)
    assert not re.search(rf"bf16\[[0-9,]*\b{prefix + own}\b", hlo)
