"""Arrays that are only described, and what the compiler says of programs over them."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ragrl.models.attention import cudnn_takes
from jax_ragrl.models.config import DecoderConfig, abstract_params, logical_axes, used_as
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import LoRAConfig, adapter_weights, with_adapter
from jax_ragrl.runtime.sharding import Rules, to_sharding, tree_shardings
from jax_ragrl.runtime.topology import is_gpu


def abstract(
    config: DecoderConfig,
    mesh: Mesh,
    rules: Rules | None = None,
    lora: LoRAConfig | None = None,
) -> Decoder:
    """A decoder, with an adapter where one is asked for, whose parameters are shapes with
    layouts."""
    shapes = abstract_params(config)
    layouts = tree_shardings(logical_axes(config), shapes, mesh, rules)
    decoder = Decoder.from_params(config, placed(shapes, layouts))
    if lora is None:
        return decoder
    table = adapter_weights(config, lora)
    arrays = {name: jax.ShapeDtypeStruct(w.shape, jnp.float32) for name, w in table.items()}
    layouts = tree_shardings({name: w.axes for name, w in table.items()}, arrays, mesh, rules)
    return with_adapter(decoder, placed(arrays, layouts), lora.alpha / lora.rank)


def bytes_of(tree: Any, compute: str | None = None) -> int:
    """Bytes that a device holds of arrays; of parameters as a forward in `compute` takes them."""

    def size(path: Any, x: Any) -> int:
        dtype = used_as(path, x, compute) if compute else x.dtype
        return math.prod(x.sharding.shard_shape(x.shape)) * dtype.itemsize

    return sum(jax.tree.leaves(jax.tree_util.tree_map_with_path(size, tree)))


def placed(tree: Any, layouts: Any) -> Any:
    """Arrays described again, with layouts."""

    def one(x: Any, layout: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

    return jax.tree.map(one, tree, layouts)


def batch(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An array whose first axis is split as a batch is."""
    names = ("batch",) + (None,) * (len(shape) - 1)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=to_sharding(names, shape, mesh))


def whole(shape: tuple[int, ...], dtype: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """An array that every device holds."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def attending(config: DecoderConfig, length: int, mesh: Mesh) -> DecoderConfig:
    """A config with the attention that its devices choose for rows of a length."""
    c, (device, *_) = config, mesh.devices.flat
    if c.attention_impl != "auto":
        return c
    q, k = (
        jax.ShapeDtypeStruct((1, length, heads, c.head_dim), jnp.dtype(c.dtype))
        for heads in (c.num_heads, c.num_kv_heads)
    )
    impl = "splash" if device.platform == "tpu" else "xla"
    if is_gpu(device):
        with jax.set_mesh(mesh):
            impl = "cudnn" if cudnn_takes(q, k) else "xla"
    return dataclasses.replace(config, attention_impl=impl)


def compiled(traced: Any, mesh: Mesh) -> tuple[dict[str, Any], Any]:
    """What the compiler says of a program: bytes beside its arguments, seconds to compile; and the
    layouts of what it returns."""
    # Where there is no GPU, none can be asked which of several kernels is faster, or possible.
    off = {"xla_gpu_autotune_level": "0", "xla_gpu_enable_triton_gemm": False}
    options: dict[str, Any] = off if is_gpu(mesh.devices.flat[0]) else {}
    begun = time.perf_counter()
    program = traced.compile(options)
    facts = {
        "temporary_bytes": int(program.memory_analysis().temp_size_in_bytes),
        "compile_s": round(time.perf_counter() - begun, 1),
    }
    return facts, program.output_shardings
