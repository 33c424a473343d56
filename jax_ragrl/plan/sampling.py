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
    with_shardings,
)
from jax_ragrl.plan.operations import head_flops, layers_flops
from jax_ragrl.plan.traffic import loop_traffic
from jax_ragrl.runtime.sharding import Rules, data_parallel_size
from jax_ragrl.sampling.contexts import PAGE, page_count
from jax_ragrl.sampling.decode import Grammar, Prompts, decode, start_decode
from jax_ragrl.sampling.sampler import Shapes


def count_sampling(
    shapes: Shapes,
    config: DecoderConfig,
    mesh: Mesh,
    *,
    width: int = 1,
    rules: Rules | None = None,
    lora: LoRAConfig | None = None,
    nucleus: bool = True,
) -> dict[str, Any]:
    """Counts the memory of the batch of prompts with the largest cache.

    A cache that grows is assumed to reach its full size before any row ends. `config` has the
    compute dtype, `width` continuations are sampled per prompt, `rules` shard the weights, and
    `nucleus` says whether tokens are sampled with a nucleus filter.

    Returns:
      `prompts` ([prompts, length]), `width`, `prefill_tokens` (of the program that is counted),
      `temporary_bytes`, `begun_bytes` (a batch that has only started, and kept contexts),
      `compile_s`, and per device the operations and the traffic of the `prefill` and of a
      `decode_step` with a full cache.
    """
    new_tokens, devices = width * shapes.max_new_tokens, data_parallel_size(mesh)
    length = max(
        shapes.prompt_lengths, key=lambda n: shapes.max_batch_size(n, devices) * (n + new_tokens)
    )
    acting = dataclasses.replace(config, param_dtype=config.dtype)
    model = SplitModel.from_model(abstract_decoder(acting, mesh, rules, lora))
    count = shapes.max_batch_size(length, devices)
    prompts = _abstract_prompts(count, width, mesh)
    facts = _decode_facts(shapes, model, prompts, length, mesh, nucleus)
    if devices == 1:
        tokens = PAGE * page_count(shapes.kept_contexts * shapes.longest)
        numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        facts["begun_bytes"] += tokens * numbers * jnp.dtype(config.dtype).itemsize
    share = count / mesh.size  # a tensor axis splits the operations of its prompts
    # The last token attends to a full cache, so no step costs more.
    keys = length + shapes.max_new_tokens
    step = share * width * (layers_flops(config, keys) + head_flops(config))
    # Only the last position of a prompt is decoded, so the head runs once per prompt.
    prefill = share * (length * layers_flops(config, length / 2) + head_flops(config))
    facts["prefill"]["flops"], facts["decode_step"]["flops"] = prefill, step
    return {"prompts": [count, length], "width": width, "prefill_tokens": count * length} | facts


def _abstract_prompts(count: int, width: int, mesh: Mesh) -> Prompts:
    def column(dtype: Any, *rest: int) -> jax.ShapeDtypeStruct:
        return batch_array((count, *rest), dtype, mesh)

    return Prompts(
        length_B=column(jnp.int32),
        seed_BW=column(jnp.uint32, width),
        sibling_BW=column(jnp.int32, width),
        temperature_B=column(jnp.float32),
        top_p_B=column(jnp.float32),
        limit_B=column(jnp.int32),
    )


def _decode_facts(
    shapes: Shapes, model: SplitModel, prompts: Prompts, length: int, mesh: Mesh, nucleus: bool
) -> dict[str, Any]:
    """The traffic and the peak of the programs of a batch, with the caches between them."""
    sizes = shapes.cache_sizes_for(shapes.max_new_tokens)
    ids = batch_array((len(prompts.length_B), length), jnp.int32, mesh)
    grammar = Grammar(replicated_array((2,), jnp.int32, mesh))
    shrink_at = replicated_array((data_parallel_size(mesh),), jnp.int32, mesh)
    with jax.set_mesh(mesh):
        trace = start_decode.lower(model, prompts, ids, slots=sizes[0])
        start = compile_program(trace, mesh)
        full = start_decode.eval_shape(model, prompts, ids, slots=sizes[-1])
        small, large = (with_shardings(x, start.shardings) for x in (trace.out_info, full))
        arguments = (model, prompts, grammar, shrink_at, *large)
        end = compile_program(decode.lower(*arguments, use_top_p=nucleus), mesh)
    step = loop_traffic(end.text)
    assert step is not None, "a decode has a loop over tokens"
    # A cache grows array by array, so one additional array exists at a time.
    grown = max(bytes_of(x) for x in jax.tree.leaves(large)) if len(sizes) > 1 else 0
    temporary = bytes_of(large) + max(end.facts["temporary_bytes"], grown)
    return {
        "temporary_bytes": max(bytes_of(small) + start.facts["temporary_bytes"], temporary),
        "begun_bytes": bytes_of(small) if len(sizes) > 1 else 0,
        "compile_s": round(start.facts["compile_s"] + end.facts["compile_s"], 1),
        "prefill": start.traffic().facts(),
        "decode_step": step.facts(),
    }
