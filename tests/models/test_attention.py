"""Implementations of attention agree, and `auto` chooses the right one."""

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
    dense_attention,
)
from jax_ragrl.runtime.sharding import make_mesh


@pytest.mark.parametrize("impl", ["xla", "auto"])
@pytest.mark.parametrize("length", [4 * MAX_BLOCK_SIDE, 3 * MIN_QUERY_BLOCK + 1])
def test_causal_attention_in_blocks_equals_dense_attention(length, impl):
    """Values and gradients, under a mask that hides every later key and many earlier ones. Some
    pairs of blocks are entirely masked, and some queries attend within their own block only."""
    rng = np.random.default_rng(0)
    mask = np.tril(rng.random((2, length, length)) < 0.5) | np.eye(length, dtype=bool)
    mask[:, MAX_BLOCK_SIDE:, :MAX_BLOCK_SIDE] = False
    mask[1, 2 * MAX_BLOCK_SIDE + 5 :, : 2 * MAX_BLOCK_SIDE] = False
    q, k, v = (rng.normal(size=(2, length, n, 4)).astype(np.float32) for n in (4, 2, 2))

    def value_and_gradients(attend):
        def total(q, k, v, mask):
            out = attend(q, k, v, mask)
            return jnp.sum(jnp.sin(out)), out

        grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(
            *jax.device_put((q, k, v, mask))
        )
        return jax.device_get((out, *grads))

    by_blocks = value_and_gradients(lambda *x: attention(*x, impl))
    for actual, expected in zip(by_blocks, value_and_gradients(dense_attention), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("queries", [1, 16])
def test_few_queries_in_bfloat16_attend_to_a_cache(queries):
    """Keys and values of a cache have the heads before the places, unlike those of a row."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(2, queries, 6, 64)).astype(np.float32)
    k, v = (rng.normal(size=(2, 2, 64, 64)).astype(np.float32) for _ in range(2))
    mask = rng.random((2, queries, 64)) < 0.5

    @jax.jit
    def attend(q, k, v, mask):
        return dense_attention(q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), mask)

    exact = attend(*jax.device_put((q, k, v, mask)))
    rounded = attend(*(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), jax.device_put(mask))
    np.testing.assert_allclose(*jax.device_get((rounded, exact)), atol=0.03)


def test_a_cpu_skips_masked_blocks_unless_xla_is_named():
    q, k = jnp.zeros((1, 2 * MAX_BLOCK_SIDE, 2, 4)), jnp.zeros((1, 2 * MAX_BLOCK_SIDE, 1, 4))

    def jaxpr(impl: str) -> str:
        return str(jax.make_jaxpr(lambda *x: attention(*x, None, impl))(q, k, k))

    assert "custom_vjp" in jaxpr("auto") and "custom_vjp" not in jaxpr("xla")


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
    jax.eval_shape(lambda *x: attention(*x, None), heads, heads, heads)
    assert [options["implementation"] for options in calls] == ["cudnn"] * supported


@pytest.mark.parametrize("impl", ["xla", "auto"])
def test_causal_attention_without_a_mask_is_lower_triangular(impl):
    rng, side = np.random.default_rng(0), 2 * MAX_BLOCK_SIDE
    q, k, v = (rng.normal(size=(2, side, n, 4)).astype(np.float32) for n in (4, 2, 2))
    without_mask = jax.jit(lambda *x: attention(*x, None, impl))
    with_mask = jax.jit(lambda *x: attention(*x, impl))
    actual = without_mask(*jax.device_put((q, k, v)))
    expected = with_mask(*jax.device_put((q, k, v, np.tri(side, dtype=bool)[None].repeat(2, 0))))
    np.testing.assert_allclose(*jax.device_get((actual, expected)), rtol=1e-5, atol=2e-6)
