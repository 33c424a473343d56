"""What lies on a run's devices beside its policies: an exact index, its encoder, language models.

Each is counted where its folder is on this machine, and else is named with the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jax_ragrl.errors import UserError
from jax_ragrl.models import encoder, hf
from jax_ragrl.models.bert import Bert
from jax_ragrl.models.by_name import model_config
from jax_ragrl.models.config import DecoderConfig, layer_weights
from jax_ragrl.models.hf_config import from_hf
from jax_ragrl.plan.abstract_arrays import abstract, bytes_of, compiled, whole
from jax_ragrl.plan.sampling import count_sampling
from jax_ragrl.retrieval.exact import most_queries, nearest, share_of_first
from jax_ragrl.retrieval.index import KINDS, read_description
from jax_ragrl.run.config import LLM, REPLY, Index
from jax_ragrl.sampling.sampler import Shapes

DEPTH = 16  # passages of a search: what it takes hardly depends on it


class Beside(NamedTuple):
    """`parts` by section of the config: `weight_bytes`, `temporary_bytes`; and what they lack."""

    parts: dict[str, dict[str, Any]]
    uncounted: list[str]

    @property
    def lasting(self) -> int:
        """Bytes of the fullest device that are there all the time. Queries are encoded, and then
        searched, beside whatever else it does."""
        searching = [self.parts[name]["temporary_bytes"] for name in SEARCH if name in self.parts]
        return sum(part["weight_bytes"] for part in self.parts.values()) + max(searching, default=0)

    @property
    def writing(self) -> int:
        """Bytes that a language model takes while it writes, which no policy does then."""
        writers = self.parts.keys() - SEARCH
        return max((self.parts[name]["temporary_bytes"] for name in writers), default=0)


SEARCH = ("index", "encoder")


def count_beside(index: Index, models: Mapping[str, LLM], shapes: Shapes, mesh: Mesh) -> Beside:
    """What an index and language models, by their section of the config, take of each device."""
    counts: dict[str, Callable[[], dict[str, Any]]] = {}
    if index.kind == "exact":
        counts["index"] = functools.partial(_vectors, index.folder, mesh)
    if index.kind in KINDS and index.encoder != "lexical":
        counts["encoder"] = functools.partial(_encoder, index.encoder, mesh)
    for name, llm in models.items():
        if llm.kind == "local":
            counts[name] = functools.partial(_model, llm, shapes, mesh)
    found = Beside({}, [])
    for name, count in counts.items():
        try:
            found.parts[name] = count()
        except UserError as error:
            found.uncounted.append(f"{name}: {error}")
    widened = [name for name in found.parts if name in models and models[name].int8]
    found.uncounted.extend(f"{name}: copies of its int8 weights, widened" for name in widened)
    return found


def shape_by_name(name: str) -> DecoderConfig:
    """The shape of a model's decoder, without its weights; `UserError` if it has none."""
    if not name:
        raise UserError("its folder is not named yet")
    return from_hf(model_config(name))


def _vectors(folder: str, mesh: Mesh) -> dict[str, Any]:
    """The part of an index's vectors that the first device holds, and the largest search."""
    if not folder:
        raise UserError("index.folder is not named, which says how large it is")
    made, devices = read_description(folder), _of_host(mesh).size
    size, width = share_of_first(made["count"], devices), made["dimension"]
    alone = _first(mesh)
    vectors = whole((size, width), jnp.dtype(made.get("dtype", "float32")), alone)
    queries = whole((most_queries(size), width), jnp.float32, alone)
    facts, _ = compiled(nearest.lower(queries, vectors, min(DEPTH, size)), alone)
    return {"vectors": [made["count"], width], "weight_bytes": bytes_of(vectors), **facts}


def _encoder(source: str, mesh: Mesh) -> dict[str, Any]:
    """An encoder, which lies on the first device, and its batch that takes most."""
    if not source:
        raise UserError("index.encoder is not named yet")
    _, config, settings = encoder.read_shape(source)
    graph, state = nnx.split(nnx.eval_shape(lambda: Bert(config, nnx.Rngs(0))))
    alone = _first(mesh)
    state = jax.tree.map(lambda x: whole(x.shape, x.dtype, alone), state)
    lengths = {min(n, settings.max_length) for n in encoder.LENGTHS}
    length = max(lengths, key=lambda n: encoder.most_rows(n) * n**2)
    rows = (encoder.most_rows(length), length)
    ids, mask = (whole(rows, dtype, alone) for dtype in (jnp.int32, jnp.bool_))
    how = (settings.pooling, settings.normalise)
    facts, _ = compiled(encoder.embed_tokens.lower(graph, state, ids, mask, *how), alone)
    return {"texts": list(rows), "weight_bytes": bytes_of(state), **facts}


def _model(llm: LLM, shapes: Shapes, mesh: Mesh) -> dict[str, Any]:
    """A frozen language model, and the batch of prompts that takes most while it writes."""
    kept = {"dtype": llm.dtype, "param_dtype": llm.dtype}
    config = dataclasses.replace(shape_by_name(llm.model), **kept)  # type: ignore[arg-type]
    params = nnx.state(abstract(config, _of_host(mesh)), nnx.Param)
    weights = bytes_of(params) - (_saved(config, params) if llm.int8 else 0)
    shapes = dataclasses.replace(shapes, steps=max(shapes.steps, REPLY))
    facts = count_sampling(shapes, config, mesh)
    names = ("prompts", "temporary_bytes", "compile_s")
    return {"weight_bytes": weights, **{name: facts[name] for name in names}}


def _saved(config: DecoderConfig, params: Any) -> int:
    """The bytes less of int8 projections, with a float32 scale for each output of each layer."""
    saved = 0
    for name, weight in layer_weights(config).items():
        if inputs := hf.layout_of(name, weight).inputs:
            kernel = bytes_of(params["layers"][name])
            scales = 4 * config.num_layers * math.prod(weight.shape[inputs:])
            saved += kernel - kernel // jnp.dtype(config.param_dtype).itemsize - scales
    return saved


def _of_host(mesh: Mesh) -> Mesh:
    """The part of a described mesh that one host has: rows of devices that share weights."""
    rows = mesh.devices.reshape(-1, mesh.shape["tensor"])
    own = [row for row in rows if row[0].process_index == rows[0, 0].process_index]
    return Mesh(np.array(own)[None], mesh.axis_names, axis_types=mesh.axis_types)


def _first(mesh: Mesh) -> Mesh:
    """The first device alone."""
    return Mesh(mesh.devices[:1, :1, :1], mesh.axis_names, axis_types=mesh.axis_types)
