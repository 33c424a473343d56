"""Attention in blocks of queries."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.models.attention import BLOCK, CUDNN_FROM, PAIR, attention, cudnn_takes
from jax_ragrl.sharding import make_mesh


@pytest.mark.parametrize("impl", ["xla", "blockwise"])
@pytest.mark.parametrize("length", [4 * PAIR, 3 * BLOCK + 1])
def test_causal_attention_in_blocks_is_attention_at_once(length, impl):
    """Values and gradients under a mask that hides every later key and many earlier ones; of blocks
    of keys and queries some show nothing, and some show a query nothing before its own block."""
    rng = np.random.default_rng(0)
    mask = np.tril(rng.random((2, length, length)) < 0.5) | np.eye(length, dtype=bool)
    mask[:, PAIR:, :PAIR] = False
    mask[1, 2 * PAIR + 5 :, : 2 * PAIR] = False
    q, k, v = (rng.normal(size=(2, length, n, 4)).astype(np.float32) for n in (4, 2, 2))

    def outcome(causal: bool):
        def total(q, k, v, mask):
            out = attention(q, k, v, mask, impl, causal=causal)
            return jnp.sum(jnp.sin(out)), out

        grads, out = jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))(
            *jax.device_put((q, k, v, mask))
        )
        return jax.device_get((out, *grads))

    for found, expected in zip(outcome(True), outcome(False), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


def test_only_a_cpu_chooses_blockwise_and_only_where_nothing_else_is_named():
    """Its loops are wrong in a program that is compiled on a CPU for another device."""
    q, k = jnp.zeros((1, 2 * PAIR, 2, 4)), jnp.zeros((1, 2 * PAIR, 1, 4))
    mask = jnp.tril(jnp.ones((1, 2 * PAIR, 2 * PAIR), bool))

    def traced(impl: str) -> str:
        return str(jax.make_jaxpr(lambda *x: attention(*x, impl, causal=True))(q, k, k, mask))

    assert "custom_vjp" in traced("auto") and "custom_vjp" in traced("blockwise")
    assert "custom_vjp" not in traced("xla")


@pytest.mark.parametrize(("shape", "fits"), [((2, 2, 2), True), ((1, 2, 4), False)])
def test_cudnn_is_not_asked_to_split_queries_without_their_keys(shape, fits):
    """Its partitioner raises where the tensor axis splits four heads but not two of keys."""
    q, k = (jax.ShapeDtypeStruct((8, CUDNN_FROM, n, 64), jnp.bfloat16) for n in (4, 2))
    assert cudnn_takes(q, k)
    with jax.set_mesh(make_mesh(shape)):
        assert cudnn_takes(q, k) == fits


@pytest.mark.parametrize(
    ("version", "capability", "taken"),
    [
        ("cuda 13", "8.0", True),
        ("cuda 12", "12.0", True),
        ("cuda 12", "7.5", False),
        ("rocm", "gfx942", False),
    ],
)
def test_cudnn_is_asked_on_gpus_that_it_has_kernels_for(monkeypatch, version, capability, taken):
    client = types.SimpleNamespace(platform_version=version)
    gpu = types.SimpleNamespace(client=client, compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    asked = []
    monkeypatch.setattr(
        jax.nn, "dot_product_attention", lambda q, *_, **how: asked.append(how) or q
    )
    heads = jax.ShapeDtypeStruct((1, CUDNN_FROM, 2, 64), jnp.bfloat16)
    jax.eval_shape(lambda *x: attention(*x, None, causal=True), heads, heads, heads)
    assert [how["implementation"] for how in asked] == ["cudnn"] * taken


@pytest.mark.parametrize("impl", ["xla", "blockwise"])
def test_causal_attention_without_a_mask_sees_everything_before(impl):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 2 * PAIR, n, 4)).astype(np.float32) for n in (4, 2, 2))
    mask = np.tril(np.ones((2, 2 * PAIR, 2 * PAIR), bool))
    without = jax.jit(lambda *x: attention(*x, None, impl, causal=True))
    within = jax.jit(lambda *x: attention(*x, impl))
    found, expected = without(*jax.device_put((q, k, v))), within(*jax.device_put((q, k, v, mask)))
    np.testing.assert_allclose(*jax.device_get((found, expected)), rtol=1e-5, atol=2e-6)
