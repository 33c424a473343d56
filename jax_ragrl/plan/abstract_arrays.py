"""Abstract arrays (shape, dtype and sharding, no data), and compilation of programs for them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ragrl.errors import UserError
from jax_ragrl.models.config import DecoderConfig, abstract_params, compute_dtype_of, logical_axes
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import LoRAConfig, adapter_weights, with_adapter
from jax_ragrl.plan.traffic import Traffic, program_traffic
from jax_ragrl.runtime.sharding import Rules, to_sharding, tree_shardings
from jax_ragrl.runtime.topology import is_gpu


def abstract_decoder(
    config: DecoderConfig, mesh: Mesh, rules: Rules | None = None, lora: LoRAConfig | None = None
) -> Decoder:
    """A decoder with abstract parameters on a mesh, by default by the rules of training."""
    shapes = abstract_params(config)
    shardings = tree_shardings(logical_axes(config), shapes, mesh, rules)
    decoder = Decoder.from_params(config, with_shardings(shapes, shardings))
    if lora is None:
        return decoder
    table = adapter_weights(config, lora)
    arrays = {name: jax.ShapeDtypeStruct(w.shape, jnp.float32) for name, w in table.items()}
    axes = {name: w.axes for name, w in table.items()}
    arrays = with_shardings(arrays, tree_shardings(axes, arrays, mesh, rules))
    return with_adapter(decoder, arrays, lora.alpha / lora.rank)


def bytes_of(tree: Any, compute: str | None = None) -> int:
    """Bytes of arrays per device; with `compute`, of parameters in the dtypes of a forward pass."""

    def size(path: Any, x: Any) -> int:
        dtype = compute_dtype_of(path, x, compute) if compute else x.dtype
        return math.prod(x.sharding.shard_shape(x.shape)) * dtype.itemsize

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(size, tree)))


def with_shardings(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, y: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=y), tree, shardings
    )


def batch_array(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An abstract array of a `shape` and `dtype` whose first axis is sharded over a `mesh`."""
    names = ("batch",) + (None,) * (len(shape) - 1)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=to_sharding(names, shape, mesh))


def replicated_array(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An abstract array of a `shape` and `dtype` that all devices of a `mesh` hold."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


class Program(NamedTuple):
    """A compiled program: facts, the shardings of its results, and its optimized HLO.

    The facts are `temporary_bytes` (without arguments and results) and `compile_s`.
    """

    facts: dict[str, Any]
    shardings: Any
    text: str

    def traffic(self) -> Traffic:
        """Returns what one execution moves."""
        return program_traffic(self.text)


class TooLargeError(UserError):
    """A program, which its caller may name, needs more memory than a device has."""

    def __init__(self, message: str, program: str = "") -> None:
        super().__init__(message)
        self.program = program


@contextlib.contextmanager
def fitting(program: str, keys: str) -> Iterator[None]:
    """Names the program, and the keys of the config that make it smaller, in a `TooLargeError`."""
    try:
        yield
    except TooLargeError as error:
        raise TooLargeError(
            f"{program} does not fit a device ({error}): lower {keys}, take more devices, or see "
            "docs/howto/memory.md",
            program,
        ) from error


def compile_trace(trace: Any, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Compiles a traced function; `TooLargeError` if a TPU's compiler finds too little memory."""
    try:
        return trace.compile(dict(options))
    except jax.errors.JaxRuntimeError as error:
        kind, _, text = str(error).partition(": ")
        if kind != "RESOURCE_EXHAUSTED":
            raise
        raise TooLargeError(text.splitlines()[0].rstrip(".")) from error


def compile_program(trace: Any, mesh: Mesh) -> Program:
    """Compiles a program for the devices of a mesh; see `compile_trace`."""
    # Autotuning runs kernels, which is impossible on described GPUs.
    no_autotuning = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
    options: dict[str, Any] = no_autotuning if is_gpu(mesh.devices.flat[0]) else {}
    # The first step of a run waits for its compilations, so a plan reports their time.
    start = time.perf_counter()
    program = compile_trace(trace, options)
    facts = {
        "temporary_bytes": int(program.memory_analysis().temp_size_in_bytes),
        "compile_s": round(time.perf_counter() - start, 1),
    }
    return Program(facts, program.output_shardings, program.as_text())
