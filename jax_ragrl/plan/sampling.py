"""Memory for sampling a batch of prompts per device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.models.split import SplitModel
from jax_ragrl.plan.abstract_arrays import (
    abstract_decoder,
    batch_array,
    bytes_of,
    compile_program,
    replicated_array,
    with_attention,
    with_shardings,
)
from jax_ragrl.runtime.sharding import Rules, data_parallel_size
from jax_ragrl.sampling.decode import Grammar, Prompts, continue_decode, generate, start_decode
from jax_ragrl.sampling.sampler import Shapes


def count_sampling(
    shapes: Shapes,
    config: DecoderConfig,
    mesh: Mesh,
    *,
    width: int = 1,
    rules: Rules | None = None,
    lora: LoRAConfig | None = None,
) -> dict[str, Any]:
    """Counts the memory of the batch of prompts with the largest cache.

    A cache that grows is assumed to reach its full size before any row ends.

    Args:
      shapes: static shapes of sampling.
      config: architecture, with the compute dtype.
      mesh: devices of the run.
      width: continuations per prompt.
      rules: sharding rules of the weights.
      lora: adapter, if any.

    Returns:
      `prompts` ([prompts, length]), `width`, `temporary_bytes`, `begun_bytes` (a batch that has
      only started) and `compile_s`.
    """
    new_tokens, devices = width * shapes.max_new_tokens, data_parallel_size(mesh)
    length = max(
        shapes.prompt_lengths, key=lambda n: shapes.max_batch_size(n, devices) * (n + new_tokens)
    )
    # Sampling holds a copy of the weights in the compute dtype.
    acting = dataclasses.replace(with_attention(config, length, mesh), param_dtype=config.dtype)
    model = SplitModel.from_model(abstract_decoder(acting, mesh, rules, lora))
    count = shapes.max_batch_size(length, devices)
    prompts = _abstract_prompts(count, length, width, mesh)
    arguments = (model, prompts, Grammar(replicated_array((2,), jnp.int32, mesh)))
    return {
        "prompts": [count, length],
        "width": width,
        **_decode_bytes(shapes, arguments, mesh),
    }


def _abstract_prompts(count: int, length: int, width: int, mesh: Mesh) -> Prompts:
    def column(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        return batch_array((count, *rest), dtype, mesh)

    return Prompts(
        ids_BP=column(jnp.int32, length),
        length_B=column(jnp.int32),
        seed_BW=column(jnp.uint32, width),
        sibling_BW=column(jnp.int32, width),
        temperature_B=column(jnp.float32),
        top_p_B=column(jnp.float32),
        limit_B=column(jnp.int32),
    )


def _decode_bytes(shapes: Shapes, arguments: tuple[Any, ...], mesh: Mesh) -> dict[str, Any]:
    """The peak of the programs of a batch, including the rows and caches between them."""
    # The sizes that a cache grows through; with one size, a single program does all.
    first, *larger = shapes.cache_sizes_for(shapes.max_new_tokens)
    with jax.set_mesh(mesh):
        if not larger:
            facts = compile_program(generate.lower(*arguments, max_new_tokens=first), mesh)[0]
            return facts | {"begun_bytes": 0}
        arguments = (*arguments, replicated_array((data_parallel_size(mesh),), jnp.int32, mesh))
        trace = start_decode.lower(*arguments, slots=first)
        start, shardings = compile_program(trace, mesh)
        full = start_decode.eval_shape(*arguments, slots=larger[-1])
        small, large = (with_shardings(x, shardings) for x in (trace.out_info, full))
        end, _ = compile_program(continue_decode.lower(*arguments, *large), mesh)
    # A cache grows array by array, so one additional array exists at a time.
    temporary = max(end["temporary_bytes"], *(bytes_of(x) for x in jax.tree.leaves(large)))
    peak = max(start["temporary_bytes"] + bytes_of(small), bytes_of(large) + temporary)
    return {
        "temporary_bytes": peak,
        "begun_bytes": bytes_of(small),
        "compile_s": round(start["compile_s"] + end["compile_s"], 1),
    }
