"""Attention in blocks of queries."""

import importlib.util
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.models.attention import (
    BLOCK,
    CUDNN_FROM,
    PAIR,
    attention,
    cudnn_takes,
    shared_attention,
)
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.runtime.topology import describe_devices


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


def decoded(width, dtype=np.float32, *, prompts=2, before=24, own=8, head_dim=4):
    """The arguments of `shared_attention` for one token of `width` siblings after each prompt."""
    rows = prompts * width
    shapes = [(rows, 1, 4, head_dim)]
    shapes += 2 * [(prompts, 2, before, head_dim)] + 2 * [(rows, 2, own, head_dim)]
    rng = np.random.default_rng(0)
    q, k0, v0, k1, v1 = (rng.normal(size=shape).astype(dtype) for shape in shapes)
    mask = rng.random((rows, 1, before + own)) < 0.5
    mask[..., 0] = True
    return q, (k0, v0), (k1, v1), mask


@pytest.mark.parametrize("width", [1, 3])
def test_shared_attention_is_attention_over_both_parts(width):
    q, before, own, mask = jax.device_put(decoded(width))
    whole = [
        jnp.swapaxes(jnp.concatenate([jnp.repeat(b, width, axis=0), o], axis=2), 1, 2)
        for b, o in zip(before, own, strict=True)
    ]
    outputs = jax.jit(shared_attention)(q, before, own, mask), attention(q, *whole, mask)
    np.testing.assert_allclose(*jax.device_get(outputs), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("width", "barriers"), [(1, 1), (2, 0)])
def test_a_single_sibling_multiplies_both_parts_with_queries_that_cannot_be_merged(width, barriers):
    jaxpr = str(jax.make_jaxpr(shared_attention)(*decoded(width)))
    assert jaxpr.count("optimization_barrier") == barriers


@pytest.mark.parametrize("width", [1, 2])
def test_a_gpu_does_not_copy_the_keys_of_both_parts_into_one_array(width):
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        pytest.skip("a CUDA plugin describes GPUs; the lock for tests has none")
    before, own = 512, 128
    arrays = decoded(width, jnp.bfloat16, before=before, own=own, head_dim=64)
    on_gpu = jax.sharding.SingleDeviceSharding(describe_devices("h100:1")[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_gpu), arrays)
    hlo = jax.jit(shared_attention).lower(*shapes).compile().as_text()
    assert re.search(rf"bf16\[[0-9,]*\b{before}\b", hlo)
    assert not re.search(rf"bf16\[[0-9,]*\b{before + own}\b", hlo)
