"""On a CPU a bfloat16 matmul is native in both passes, and other matmuls are as XLA writes them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.models import matmul as module
from jax_ragrl.models.matmul import matmul
from jax_ragrl.runtime.sharding import make_mesh


def arrays(inputs: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Activations `[2, 64, ...]`, a kernel and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 3)
    kernel = {1: (128, 2, 64), 2: (2, 64, 128)}[inputs]
    shapes = ((2, 64, *kernel[:inputs]), kernel, (2, 64, *kernel[inputs:]))
    return tuple(
        jax.random.normal(keys[i], shape, jnp.dtype(dtype)) for i, shape in enumerate(shapes)
    )


def products(inputs: int):
    """Returns a function that returns the product and both gradients."""

    def run(x, kernel, grad):
        y, pull = jax.vjp(lambda x, kernel: matmul(x, kernel, inputs), x, kernel)
        return y, *pull(grad)

    return run


@pytest.mark.parametrize("inputs", [1, 2])
def test_bfloat16_products_and_gradients_are_exact_up_to_one_rounding(inputs):
    operands = arrays(inputs, "bfloat16")
    wide = [x.astype(jnp.float32) for x in operands]
    actual, expected = jax.jit(products(inputs))(*operands), jax.jit(products(inputs))(*wide)
    for x, y in zip(actual, expected, strict=True):
        assert x.dtype == jnp.bfloat16 and x.shape == y.shape
        error = np.abs(jax.device_get(x.astype(jnp.float32)) - jax.device_get(y))
        assert error.max() <= 2**-8 * np.abs(jax.device_get(y)).max()


@pytest.mark.parametrize("inputs", [1, 2])
def test_a_cpu_multiplies_bfloat16_without_widening_the_operands(inputs):
    """The traced products take bfloat16 and return float32: XLA for CPUs widens any others."""
    text = str(jax.make_jaxpr(products(inputs))(*arrays(inputs, "bfloat16")))
    dots = re.findall(r"(\w+)\[[\d,]*\] = dot_general", text)
    assert dots == ["f32"] * 3
    assert "f32" not in re.findall(r"convert_element_type\[new_dtype=(\w+)", text)


@pytest.mark.parametrize("dtype, backend", [("float32", "cpu"), ("bfloat16", "gpu")])
def test_other_matmuls_are_plain(dtype, backend, monkeypatch):
    monkeypatch.setattr(module.jax, "default_backend", lambda: backend)
    x, kernel, _ = arrays(1, dtype)
    text = str(jax.make_jaxpr(matmul)(x, kernel))
    assert text == str(jax.make_jaxpr(lambda x, w: jnp.tensordot(x, w, 1))(x, kernel))


@pytest.mark.parametrize("inputs", [1, 2])
def test_a_flat_gradient_equals_that_with_heads(inputs, monkeypatch):
    """A TPU with an fsdp axis computes the gradient of a flat kernel, and separately."""
    x, kernel, grad = arrays(inputs, "float32")
    expected = jax.jit(products(inputs))(x, kernel, grad)
    monkeypatch.setattr(module, "target_platform", lambda: "tpu")
    with jax.set_mesh(make_mesh((1, 4, 2))):
        traced = jax.jit(products(inputs)).trace(x, kernel, grad)
        actual = traced.lower().compile()(*jax.device_get((x, kernel, grad)))
    assert "optimization_barrier" in str(traced.jaxpr)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(jax.device_get(a), jax.device_get(b), rtol=1e-5, atol=1e-4)
