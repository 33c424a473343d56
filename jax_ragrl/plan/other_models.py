"""Memory of the other models of a run: an exact index, its encoder, frozen language models.

A model is counted if its folder is on this machine; otherwise it is listed with the reason.
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
from jax_ragrl.llm.kinds import LLM, LocalLLMConfig
from jax_ragrl.models import encoder, hf, text_batches
from jax_ragrl.models.by_name import model_config
from jax_ragrl.models.config import DecoderConfig, layer_weights
from jax_ragrl.models.hf_config import from_hf
from jax_ragrl.models.pooling import Dense, SentenceModel
from jax_ragrl.models.sentence_files import dense_spec, read_modules
from jax_ragrl.plan.abstract_arrays import (
    TooLargeError,
    abstract_decoder,
    bytes_of,
    compile_program,
    replicated_array,
)
from jax_ragrl.plan.index_memory import parts_of
from jax_ragrl.plan.operations import time_at_least
from jax_ragrl.plan.sampling import count_sampling
from jax_ragrl.retrieval.description import read_description
from jax_ragrl.retrieval.exact import (
    Quantized,
    most_queries,
    nearest,
    padded,
    share_of_first,
    stream_rows,
)
from jax_ragrl.retrieval.kinds import (
    HASHED_WORDS,
    INT8,
    LISTWISE,
    Index,
    PipelineIndex,
    VectorIndex,
)
from jax_ragrl.run.config import REPLY
from jax_ragrl.runtime.sharding import part_of_process
from jax_ragrl.runtime.topology import CEILINGS, describe_devices
from jax_ragrl.sampling.sampler import Shapes
from jax_ragrl.sampling.weights import SAMPLING_RULES

DEPTH = 16  # passages per search, which hardly affects its memory
# The places of exact indexes: the devices of each host, or one server per host.
DEVICES, SERVER = "devices", "server"
# The config of a run that asks a server on its own host ('ragrl serve retriever').
REMOTE = {"index.kind": "remote", "index.url": "http://localhost:8001"}


class OtherModels(NamedTuple):
    """Memory per section of the config (`weight_bytes`, `temporary_bytes`).

    `uncounted_models` has one message per model that is missing or counted only approximately.
    """

    sections: dict[str, dict[str, Any]]
    uncounted_models: list[str]

    @property
    def permanent_bytes(self) -> int:
        """Permanent bytes of the fullest device, with those of `search_bytes`."""
        models = (x["weight_bytes"] for name, x in self.sections.items() if not _is_search(name))
        return sum(models) + self.search_bytes

    @property
    def search_bytes(self) -> int:
        """Bytes of indexes and encoders on the fullest device.

        Temporary memory of searching is included, because searches overlap with all other work; the
        encoder and the index run one after the other.
        """
        own = [x for name, x in self.sections.items() if _is_search(name)]
        largest = max((x["temporary_bytes"] for x in own), default=0)
        return sum(x["weight_bytes"] for x in own) + largest

    @property
    def generation_bytes(self) -> int:
        """Temporary bytes of a language model while it generates; policies do not run then."""
        models = [name for name in self.sections if not _is_search(name)]
        return max((self.sections[name]["temporary_bytes"] for name in models), default=0)


def _is_search(name: str) -> bool:
    # A pipeline has several, such as `encoder 2`.
    return name.split()[0] in ("index", "encoder")


def count_other_models(
    index: Index, models: Mapping[str, LLM], shapes: Shapes, mesh: Mesh
) -> OtherModels:
    """Counts the memory per device of an index and of language models by section of the config."""
    counts: dict[str, Callable[[], dict[str, Any]]] = {}
    # Words and servers use no memory of the devices.
    vectors = [part for part in parts_of(index) if isinstance(part, VectorIndex)]
    for number, part in enumerate(vectors, start=1):
        suffix = f" {number}" if number > 1 else ""
        if part.kind == "exact":
            counts[f"index{suffix}"] = functools.partial(_vectors, part.folder, mesh)
        if part.encoder != HASHED_WORDS:
            counts[f"encoder{suffix}"] = functools.partial(_encoder, part.encoder, mesh)
    for name, llm in models.items():
        if isinstance(llm, LocalLLMConfig):
            counts[name] = functools.partial(_model, llm, shapes, mesh)
    others = OtherModels({}, [])
    if isinstance(index, PipelineIndex) and index.rerank not in ("", LISTWISE):
        others.uncounted_models.append(f"reranker {index.rerank}: its memory is not counted")
    for name, count in counts.items():
        try:
            others.sections[name] = count()
        except UserError as error:
            others.uncounted_models.append(f"{name}: {error}")
    for name, llm in models.items():
        # A forward pass may need them.
        if name in others.sections and isinstance(llm, LocalLLMConfig) and llm.int8:
            text = f"{name}: copies of its int8 weights in the compute dtype"
            others.uncounted_models.append(text)
    return others


def index_place(others: OtherModels, peak: int, memory: int | None) -> dict[str, Any]:
    """Chooses the place of the exact indexes of a run and of their encoders; empty without any.

    `peak` are the bytes of the fullest device with all models, `memory` those of a device, if
    known. Returns `device_bytes` of indexes, encoders and searches, and the `place`: `DEVICES`, or
    `SERVER` if the run fits without them alone.
    """
    if not any(name.startswith("index") for name in others.sections):
        return {}
    own = others.search_bytes
    needs_server = memory is not None and peak - own < memory <= peak
    return {"place": SERVER if needs_server else DEVICES, "device_bytes": own}


def config_by_name(name: str) -> DecoderConfig:
    """Returns the architecture of a model by its name; reads no weights."""
    if not name:
        raise UserError("the config does not name its folder yet")
    return from_hf(model_config(name))


def _vectors(folder: str, mesh: Mesh) -> dict[str, Any]:
    """The vectors of an index on the first device; memory and least time of the largest search."""
    if not folder:
        raise UserError("its size is unknown: name index.folder")
    description, devices = read_description(folder), host_mesh(mesh).size
    size, width = share_of_first(description["count"], devices), description["dimension"]
    device = _first_device(mesh)
    rows = padded(size)
    vectors = _rows((rows, width), description.get("dtype", "float32"), device)
    stream = stream_rows(device.devices.flat[0])
    batch = most_queries(size, stream)
    queries = replicated_array((batch, width), jnp.float32, device)
    count = replicated_array((), jnp.int32, device)
    search = nearest.lower(queries, vectors, count, k=min(DEPTH, size), stream=stream)
    counts = {"vectors": [description["count"], width], "weight_bytes": bytes_of(vectors)}
    try:
        program = compile_program(search, device)
    except TooLargeError:
        # The vectors alone exceed the memory of the device.
        return counts | {"temporary_bytes": 0, "compile_s": 0.0}
    counts |= {**program.facts, "queries": batch}
    if ceilings := CEILINGS.get(device.devices.flat[0].device_kind):
        work = {"flops": 2 * batch * size * width, **program.traffic().facts()}
        counts |= time_at_least(work, ceilings)
    return counts


def _rows(shape: tuple[int, int], dtype: str, device: Mesh) -> Any:
    array = replicated_array(shape, jnp.dtype(dtype), device)
    if dtype != INT8:
        return array
    return Quantized(array, replicated_array((shape[0], 1), jnp.float32, device))


def _encoder(source: str, mesh: Mesh) -> dict[str, Any]:
    """An encoder on the first device, and the temporary memory of its largest batch.

    A decoder's weights are divided over the devices of a host, but counted as a whole here.
    """
    if not source:
        raise UserError("the config does not name index.encoder yet")
    folder, backbone, settings = encoder.read_config(source)
    specs = [dense_spec(path) for path in read_modules(folder).dense]

    def make() -> SentenceModel:
        dense = [Dense(spec, nnx.Rngs(0)) for spec in specs]
        return SentenceModel(backbone.make(), settings.pooling, dense, settings.normalise)

    graph, state = nnx.split(nnx.eval_shape(make))
    device = _first_device(mesh)
    state = jax.tree.map(lambda x: replicated_array(x.shape, x.dtype, device), state)
    lengths = {min(n, settings.max_length) for n in text_batches.LENGTH_BUCKETS}
    # Attention dominates: its memory grows with the square of the length.
    length = max(lengths, key=lambda n: text_batches.max_rows(n) * n**2)
    rows = (text_batches.max_rows(length), length)
    ids, mask = (replicated_array(rows, dtype, device) for dtype in (jnp.int32, jnp.bool_))
    facts = compile_program(text_batches.run_model.lower(graph, state, ids, mask), device).facts
    return {"texts": list(rows), "weight_bytes": bytes_of(state), **facts}


def _model(llm: LocalLLMConfig, shapes: Shapes, mesh: Mesh) -> dict[str, Any]:
    """A frozen language model, and the temporary memory of its largest batch of prompts."""
    dtypes = {"dtype": llm.dtype, "param_dtype": llm.dtype}
    config = dataclasses.replace(config_by_name(llm.model), **dtypes)  # type: ignore[arg-type]
    host = host_mesh(mesh)
    params = nnx.state(abstract_decoder(config, host, SAMPLING_RULES), nnx.Param)
    weights = bytes_of(params) - (_int8_savings(config, params) if llm.int8 else 0)
    # As `load_llm`: replies may be longer than the actions of policies.
    limit = llm.max_tokens or max(shapes.max_new_tokens, REPLY)
    shapes = dataclasses.replace(shapes, max_new_tokens=limit, kept_contexts=0)
    facts = count_sampling(shapes, config, host, rules=SAMPLING_RULES)
    names = ("prompts", "temporary_bytes", "compile_s")
    return {"weight_bytes": weights, **{name: facts[name] for name in names}}


def _int8_savings(config: DecoderConfig, params: Any) -> int:
    """Bytes that int8 projections save; they add a float32 scale per output and layer."""
    savings = 0
    for name, weight in layer_weights(config).items():
        if inputs := hf.layout_of(name, weight).inputs:
            kernel = bytes_of(params["layers"][name])
            scales = 4 * config.num_layers * math.prod(weight.shape[inputs:])
            savings += kernel - kernel // jnp.dtype(config.param_dtype).itemsize - scales
    return savings


LITE_HOSTS = {"TPU v5 lite": "v5e:2x2", "TPU v6 lite": "v6e:2x2"}  # the chips of a host of a slice


def host_mesh(mesh: Mesh) -> Mesh:
    """The part of a described mesh on its first host, as `local_mesh` of a real one.

    `TooLargeError` if the axis tensor spans several hosts, which a run refuses.
    """
    first = mesh.devices.flat[0]
    if all(device.process_index == first.process_index for device in mesh.devices.flat):
        return mesh
    try:
        host = part_of_process(mesh, first.process_index)
    except UserError as error:
        raise TooLargeError(str(error), "sampling") from error
    # For these kinds XLA compiles no program for a part of a slice.
    if name := LITE_HOSTS.get(first.device_kind):
        chips = np.array(describe_devices(name)).reshape(host.devices.shape)
        host = Mesh(chips, mesh.axis_names, axis_types=mesh.axis_types)
    return host


def _first_device(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices[:1, :1, :1], mesh.axis_names, axis_types=mesh.axis_types)
