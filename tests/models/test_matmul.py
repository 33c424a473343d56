"""On a CPU with bfloat16 instructions its matmuls are native in both passes; others are plain."""

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


@pytest.mark.parametrize(
    ("tokens", "is_native", "is_widened"),
    [(128, True, False), (128, False, True), (127, False, False)],
)
@pytest.mark.parametrize("inputs", [1, 2])
def test_a_cpu_widens_the_operands_of_large_products_alone(
    inputs, tokens, is_native, is_widened, monkeypatch
):
    """The traced products return float32: XLA for CPUs widens the operands of any others."""
    monkeypatch.setattr(module, "multiplies_bfloat16", lambda: is_native)
    x, kernel, grad = arrays(inputs, "bfloat16")
    x, grad = (a.reshape(-1, *a.shape[2:])[:tokens] for a in (x, grad))
    text = str(jax.make_jaxpr(products(inputs))(x, kernel, grad))
    dots = re.findall(r"(\w+)\[[\d,]*\] = dot_general", text)
    assert dots == ["f32"] * 3
    operands = re.findall(r"dot_general\[.*?\] (\w+) (\w+)", text, re.DOTALL)
    dtypes = dict(re.findall(r"(\w+):(\w+)\[[\d,]*\]", text))
    assert {dtypes[x] for pair in operands for x in pair} == {"f32" if is_widened else "bf16"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("flags : fpu avx2 avx512_bf16", True),
        ("flags\t\t: fpu avx2 fma", False),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
        ("processor : 0", True),
        (None, True),  # macOS and Windows have no such file
    ],
)
def test_instructions_for_bfloat16_are_read_from_the_system(lines, expected, tmp_path, monkeypatch):
    if lines is not None:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{lines}\n")
    monkeypatch.setattr(module, "CPU_INFO", tmp_path / "cpuinfo")
    assert module.multiplies_bfloat16.__wrapped__() is expected


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
