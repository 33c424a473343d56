"""Products: native bfloat16 on a CPU that has it, and gradients summed in float32."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_ragrl.models import matmul as module
from jax_ragrl.models.matmul import matmul
from jax_ragrl.models.vocabulary import compute_copy, gradient_sink, look_up, project
from jax_ragrl.plan.traffic import program_traffic
from jax_ragrl.runtime.sharding import make_mesh, shard_batch, to_sharding


def arrays(inputs: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Activations `[2, 64, ...]`, a kernel and a cotangent."""
    keys = jax.random.split(jax.random.key(0), 3)
    kernel = {1: (128, 2, 64), 2: (2, 64, 128)}[inputs]
    shapes = ((2, 64, *kernel[:inputs]), kernel, (2, 64, *kernel[inputs:]))
    return tuple(
        jax.random.normal(keys[i], shape, jnp.dtype(dtype)) for i, shape in enumerate(shapes)
    )


def products(inputs: int):

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
def test_a_cpu_widens_operands_of_large_products(
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


RNG = np.random.default_rng(0)
TABLE_VD = RNG.normal(size=(16, 8)).astype(np.float32)
# 80 % of the tokens are token 3.
IDS = np.where(RNG.random(6000) < 0.8, 3, RNG.integers(0, 16, 6000)).astype(np.int32)


def embed(table_VD, ids, dtype):
    return look_up(compute_copy(table_VD, dtype), gradient_sink(table_VD), ids)


def logits_of(table_VD, hidden, dtype):
    return project(compute_copy(table_VD, dtype), gradient_sink(table_VD), hidden.astype(dtype))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_the_gradient_of_a_frequent_token_is_a_full_sum(dtype, tolerance):
    """In bfloat16 the sum over 4,800 occurrences would stop at a few hundred."""
    push_ND = (1 + 0.1 * RNG.normal(size=(len(IDS), 8))).astype(np.float32)

    def total(table_VD, ids, push_ND):
        return jnp.sum(embed(table_VD, ids, dtype).astype(jnp.float32) * push_ND)

    grad_VD = jax.device_get(jax.jit(jax.grad(total))(*jax.device_put((TABLE_VD, IDS, push_ND))))
    expected_VD = np.zeros((16, 8))
    np.add.at(expected_VD, IDS, push_ND)
    assert grad_VD.dtype == np.float32
    np.testing.assert_allclose(grad_VD, expected_VD, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_logits_and_gradients_are_those_of_a_matmul(dtype, tolerance):
    hidden_ND, push_NV = RNG.normal(size=(2, 50, 8)), RNG.normal(size=(2, 50, 16))
    args = jax.device_put([x.astype(np.float32) for x in (TABLE_VD, hidden_ND, push_NV)])

    def total(table_VD, hidden_ND, push_NV):
        logits_NV = logits_of(table_VD, hidden_ND, dtype)
        assert logits_NV.dtype == jnp.float32
        return jnp.sum(logits_NV * push_NV), logits_NV

    grads, logits_NV = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(*args)
    actual = jax.device_get((logits_NV, *grads))
    expected = (
        hidden_ND @ TABLE_VD.T,
        np.einsum("bnv,bnd->vd", push_NV, hidden_ND),
        push_NV @ TABLE_VD,
    )
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * np.abs(y).max())


def test_backward_matmuls_are_in_the_compute_dtype():
    def total(table_VD, hidden_ND):
        return jnp.sum(logits_of(table_VD, hidden_ND, "bfloat16"))

    args = (jnp.zeros((16, 8)), jnp.zeros((4, 8)))
    lines = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*args).as_text().splitlines()
    matmuls = [line for line in lines if "dot_general" in line]
    assert len(matmuls) >= 2
    for line in matmuls:
        operands = line.rpartition(": (")[2].partition(")")[0]
        assert operands.count("bf16") == 2, line


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 4, 1), (2, 2, 2)])
def test_each_device_sums_the_gradient_of_its_own_columns(shape):
    """Equal to one device, and no device exchanges the gradient of a whole table."""
    mesh, ids_BL = make_mesh(shape), IDS[:4000].reshape(8, 500)
    push_BLD = RNG.normal(size=(8, 500, 8)).astype(np.float32)

    def total(table_VD, ids_BL, push_BLD):
        return jnp.sum(embed(table_VD, ids_BL, "float32") * push_BLD)

    expected_VD = np.zeros((16, 8))
    np.add.at(expected_VD, ids_BL, push_BLD)
    columns = to_sharding(("vocab", "embed"), (16, 8), mesh)
    with jax.set_mesh(mesh):
        args = jax.device_put(TABLE_VD, columns), *shard_batch((ids_BL, push_BLD), mesh)
        program = jax.jit(jax.grad(total), out_shardings=columns).lower(*args).compile()
        grad_VD = jax.device_get(program(*args))
    np.testing.assert_allclose(grad_VD, expected_VD, rtol=1e-4, atol=1e-4)
    traffic = program_traffic(program.as_text())
    assert traffic.collectives["all-to-all"] == 1
    own = 16 * 8 * 4 // (shape[1] * shape[2])
    assert traffic.collective_bytes.get("all-reduce", 0) == (own if shape[0] > 1 else 0)
