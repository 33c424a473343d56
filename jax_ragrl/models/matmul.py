"""The matmuls of the package's models: operands in the compute dtype, sums in float32.

XLA for CPUs multiplies bfloat16 natively only if the result is float32 (JAX 0.10). Therefore
`matmul` asks for float32 on a CPU, in both passes, and rounds the result. On a CPU without
instructions for it, the native product takes up to 1.8 times as long as a float32 product, so that
the operands of large products are converted.
"""

from __future__ import annotations

import functools
import math
import pathlib

import jax
import jax.numpy as jnp
from jax import Array

from jax_ragrl.runtime.sharding import axis_size, target_platform

# Tokens from which a product repays the conversion of its operands on a CPU without bfloat16.
CONVERT_FROM = 128
CPU_INFO = pathlib.Path("/proc/cpuinfo")
# Instruction sets of x86-64 and of 64-bit Arm that multiply bfloat16, as Linux names them.
BFLOAT16_FLAGS = {"avx512_bf16", "avx_vnni_bf16", "amx_bf16", "bf16"}


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 natively; True if the system does not say."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.is_file() else []
    flags = [line for line in lines if line.lower().startswith(("flags", "features"))]
    return not flags or bool(BFLOAT16_FLAGS & set(flags[0].split()))


def einsum_f32(subscripts: str, x: Array, y: Array) -> Array:
    """Returns `einsum(subscripts, x, y)` in float32, whatever the dtype of `x` and `y`."""
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def matmul(x: Array, kernel: Array, inputs: int = 1) -> Array:
    """Returns the contraction of the last `inputs` axes of `x` with the first ones of `kernel`.

    All are in the dtype of `x`.
    """
    if x.dtype == jnp.bfloat16 and target_platform() == "cpu":
        return _native_matmul(inputs, x, kernel)
    if kernel.ndim > 2 and target_platform() == "tpu" and axis_size("fsdp") > 1:
        return _scattered_matmul(inputs, x, kernel)
    return jnp.tensordot(x, kernel, axes=inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scattered_matmul(inputs: int, x: Array, kernel: Array) -> Array:
    """Returns the product; the gradient of the kernel is computed with two axes.

    XLA for TPU sums the gradient of a kernel with narrow heads on every device. It scatters the sum
    of a flat one, if nothing moves the reshaping across the sum.
    """
    return jnp.tensordot(x, kernel, inputs)


def _scattered_backward(
    inputs: int, residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    x, kernel = residuals
    (dx,) = jax.linear_transpose(lambda x: jnp.tensordot(x, kernel, inputs), x)(grad)
    width = math.prod(kernel.shape[:inputs])
    flat = x.reshape(-1, width).T @ grad.reshape(-1, kernel.size // width)
    return dx, jax.lax.optimization_barrier(flat).reshape(kernel.shape)


_scattered_matmul.defvjp(
    lambda inputs, x, kernel: (_scattered_matmul(inputs, x, kernel), (x, kernel)),
    _scattered_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _native_matmul(inputs: int, x: Array, kernel: Array) -> Array:
    axes = tuple(range(x.ndim - inputs, x.ndim)), tuple(range(inputs))
    return _product(x, kernel, axes, math.prod(x.shape[: x.ndim - inputs])).astype(x.dtype)


def _backward(inputs: int, residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    batch, outputs = tuple(range(x.ndim - inputs)), range(-kernel.ndim + inputs, 0)
    of_grad, of_kernel = (tuple(a.ndim + i for i in outputs) for a in (grad, kernel))
    # 1. dx = grad W^T, over the output axes; 2. dW = x^T grad, over all tokens.
    tokens = math.prod(x.shape[: x.ndim - inputs])
    dx = _product(grad, kernel, (of_grad, of_kernel), tokens)
    dkernel = _product(x, grad, (batch, batch), tokens)
    return dx.astype(x.dtype), dkernel.astype(kernel.dtype)


def _product(
    x: Array, y: Array, axes: tuple[tuple[int, ...], tuple[int, ...]], tokens: int
) -> Array:
    """Returns the float32 product of a layer with some tokens, contracted over axes of both."""
    if tokens >= CONVERT_FROM and not multiplies_bfloat16():
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


_native_matmul.defvjp(
    lambda inputs, x, kernel: (_native_matmul(inputs, x, kernel), (x, kernel)), _backward
)
