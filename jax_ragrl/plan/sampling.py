"""What the sampling of a batch of prompts takes of each device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jax_ragrl.models.config import DecoderConfig
from jax_ragrl.models.lora import LoRAConfig
from jax_ragrl.plan.abstract_arrays import (
    abstract,
    attending,
    batch,
    bytes_of,
    compiled,
    placed,
    whole,
)
from jax_ragrl.runtime.sharding import Rules, ways
from jax_ragrl.sampling.decode import Grammar, Prompts, begin, generate, go_on
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
    """The batch of prompts whose cache is largest, `width` continuations each, in `config.dtype`,
    by weights that lie as `rules` has them.

    Where a cache grows, the batch is taken to need all of it while no row has ended; a batch that
    has only begun takes `begun_bytes`.
    """
    new, shared = width * shapes.steps, ways(mesh)
    length = max(shapes.lengths, key=lambda n: shapes.most(n, shared) * (n + new))
    acting = dataclasses.replace(attending(config, length, mesh), param_dtype=config.dtype)
    graph, params = nnx.split(abstract(acting, mesh, rules, lora), nnx.Param)
    count = shapes.most(length, shared)

    def column(dtype: Any) -> jax.ShapeDtypeStruct:
        return batch((count,), dtype, mesh)

    prompts = Prompts(
        ids_BP=batch((count, length), jnp.int32, mesh),
        length_B=column(jnp.int32),
        seed_B=column(jnp.uint32),
        temperature_B=column(jnp.float32),
        top_p_B=column(jnp.float32),
        limit_B=column(jnp.int32),
    )
    given = (graph, params, prompts, Grammar(whole((2,), jnp.int32, mesh)))
    return {"prompts": [count, length], "width": width, **_decoding(shapes, width, given, mesh)}


def _decoding(shapes: Shapes, width: int, given: tuple[Any, ...], mesh: Mesh) -> dict[str, Any]:
    """What the programs of a batch take at most, with the rows and caches between them."""
    first, *more = shapes.caches(shapes.steps)
    with jax.set_mesh(mesh):
        if not more:
            facts = compiled(generate.lower(*given, width=width, steps=first), mesh)[0]
            return facts | {"begun_bytes": 0}
        given = (*given, whole((ways(mesh),), jnp.int32, mesh))
        traced = begin.lower(*given, width=width, slots=first)
        begun, layouts = compiled(traced, mesh)
        last = begin.eval_shape(*given, width=width, slots=more[-1])
        small, large = (placed(x, layouts) for x in (traced.out_info, last))
        ended, _ = compiled(go_on.lower(*given, *large), mesh)
    # A cache is copied array by array while it grows.
    beside = max(ended["temporary_bytes"], *(bytes_of(x) for x in jax.tree.leaves(large)))
    most = max(begun["temporary_bytes"] + bytes_of(small), bytes_of(large) + beside)
    return {
        "temporary_bytes": most,
        "begun_bytes": bytes_of(small),
        "compile_s": round(begun["compile_s"] + ended["compile_s"], 1),
    }
