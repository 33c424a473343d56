"""Bars of programs for described devices: bytes of a decode step, kernels, copies, gradients.

They need libtpu and JAX's CUDA plugin, which compile without a device.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jax_ragrl.learner.objective import Objective
from jax_ragrl.models.config import DecoderConfig, layer_weights
from jax_ragrl.models.published import published_config
from jax_ragrl.plan import ALL_DEVICES, sampling
from jax_ragrl.plan.abstract_arrays import Program, batch_array, compile_program, replicated_array
from jax_ragrl.plan.hlo import ARRAY, Instruction, Module, parse, shape_bytes
from jax_ragrl.plan.policies import PlannedPolicy, _gradient_program
from jax_ragrl.plan.traffic import FREE, _unknown_bodies
from jax_ragrl.retrieval.exact import nearest, padded, share_of_first, stream_rows
from jax_ragrl.runtime.sharding import Rules, data_parallel_size, make_mesh
from jax_ragrl.runtime.topology import describe_devices
from jax_ragrl.sampling.sampler import Shapes

pytestmark = pytest.mark.slow
NEW = 128
LAYERS = 2  # of a gradient; layers are equal, so that two stand for all


@pytest.fixture(autouse=True)
def devices_that_are_not_present(monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    # Prompts of 1,024 tokens attend with cuDNN, whose library is not needed to compile.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


def devices_of(topology: str) -> list[jax.Device]:
    """Described devices; without the plugin that compiles for them the test is skipped."""
    pytest.importorskip("jax_cuda13_plugin" if topology.startswith("h") else "libtpu")
    return describe_devices(topology)


def mesh_of(topology: str) -> jax.sharding.Mesh:
    return make_mesh((1, 1, 1), devices_of(topology)[:1])


@functools.cache
def decode_program(
    topology: str, prompts: int, width: int, length: int, **changes: Any
) -> tuple[dict[str, Any], list[str]]:
    """The facts of a decode step of Qwen2.5-0.5B in bfloat16, and the texts of its programs."""
    texts = list[str]()

    def keep(trace: Any, mesh: jax.sharding.Mesh) -> Any:
        program = compile_program(trace, mesh)
        texts.append(program.text)
        return program

    config = dataclasses.replace(published_config("qwen2.5-0.5b"), dtype="bfloat16", **changes)
    shapes = Shapes(
        prompt_lengths=(length,),
        batch_sizes=(prompts,),
        max_new_tokens=NEW,
        max_prompt_tokens=prompts * length,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "compile_program", keep)
        facts = sampling.count_sampling(
            shapes, config, mesh_of(topology), width=width, rules=Rules(embed=None), nucleus=False
        )
    return facts["decode_step"], texts


def loop_instructions(text: str) -> Iterator[Instruction]:
    """Yields the instructions of the loop over tokens that write an array."""
    module = parse(text)
    for name in _unknown_bodies(module, module.entry):
        yield from _instructions(module, name)


def _instructions(module: Module, name: str) -> Iterator[Instruction]:
    for x in module.computations[name].instructions.values():
        if x.operation in ("while", "call", "conditional"):
            for callee in x.callees:
                yield from _instructions(module, callee)
        elif x.operation not in FREE:
            yield x


@pytest.mark.parametrize(
    ("topology", "most"), [("h200:1", 3.5e9), ("v5e:2x2", 2.9e9)], ids=["h200", "v5e"]
)
def test_the_bytes_of_a_decode_step_stay_below_a_bound(topology, most):
    """256 rows, 8 siblings after prompts of 1,024 tokens; weights, caches and logits are 2.1 GB."""
    step, _ = decode_program(topology, 32, 8, 1024)
    assert 2.1e9 < step["hbm_bytes"] < most


def test_the_kernels_of_a_layer_on_a_gpu_stay_below_a_bound():
    step, _ = decode_program("h200:1", 32, 8, 1024)
    layers = published_config("qwen2.5-0.5b").num_layers
    assert step["kernels"] / layers <= 16


def test_a_decode_step_on_a_gpu_writes_the_logits_once():
    """A GPU cannot divide within the product: a division after it would write all of them again."""
    _, (_, text) = decode_program("h200:1", 32, 8, 1024)
    writers = [x.name for x in loop_instructions(text) if "[256,151936]" in x.shape]
    assert len(writers) == 1


def test_without_siblings_a_token_writes_no_array_as_large_as_the_keys_of_the_prompts():
    """XLA would concatenate the keys of prompt and reply for each token."""
    prompts, length = 64, 4096
    # Few tokens, so that no logits are as large as the keys of a layer.
    _, (_, text) = decode_program("h200:1", prompts, 1, length, num_layers=2, vocab_size=4096)
    config = published_config("qwen2.5-0.5b")
    keys = 2 * prompts * config.num_kv_heads * length * config.head_dim
    sizes = {x.name: shape_bytes(x.shape) for x in loop_instructions(text)}
    assert sizes and max(sizes.values()) < keys


@pytest.mark.parametrize("devices", [1, 4, 8])
def test_exact_search_of_a_wikipedia_moves_no_padded_copy(devices):
    """21,015,324 passages in bfloat16: only blocks of the scan and their scores are temporary."""
    rows, width, queries = padded(share_of_first(21_015_324, devices)), 768, 256
    mesh = mesh_of("h200:1")
    arguments = (
        batch_array((queries, width), jnp.float32, mesh),
        batch_array((rows, width), jnp.bfloat16, mesh),
        replicated_array((), jnp.int32, mesh),
    )
    with jax.set_mesh(mesh):
        stream = stream_rows(mesh.devices.flat[0])
        program = compile_program(nearest.lower(*arguments, k=64, stream=stream), mesh)
    # A block of vectors and its scores; a copy of all vectors has 4 GB or more.
    assert program.facts["temporary_bytes"] < 9e8 < 2 * rows * width / 4


def gradient_program(
    name: str, topology: str, length: int
) -> tuple[Program, DecoderConfig, dict[str, int]]:
    """The gradient of a row per device, on the mesh that the configs of the papers choose."""
    config = dataclasses.replace(
        published_config(name), dtype="bfloat16", num_layers=LAYERS, remat="full"
    )
    mesh = make_mesh(ALL_DEVICES, devices_of(topology), config.hidden_size)
    model = PlannedPolicy(name, config).training_model(mesh)
    rows = data_parallel_size(mesh), length
    return _gradient_program(model, rows, Objective(), mesh), config, dict(mesh.shape)


def matrices(config: DecoderConfig) -> list[int]:
    """The number of weights of each matrix of a layer."""
    return [math.prod(w.shape) for w in layer_weights(config).values() if "embed" in w.axes]


def sums_on_every_device(text: str) -> Iterator[int]:
    """Yields the number of elements of each array that is summed on all devices of a group."""
    for name, computation in parse(text).computations.items():
        # A scattered sum is an all-reduce in a fusion of this name.
        if name.startswith("all-reduce-scatter"):
            continue
        for x in computation.instructions.values():
            if x.operation in ("all-reduce", "all-reduce-start"):
                for _, sizes, _ in ARRAY.findall(x.shape):
                    yield math.prod(int(size) for size in sizes.split(",") if size)


def scattered_matrices(text: str) -> int:
    """The number of arrays of which each device sums its own part, a loop over layers once."""
    count = 0
    for name, computation in parse(text).computations.items():
        # A ring: while devices pass partial sums on, each multiplies for the next one.
        count += "windowed_dot_general_body_rs" in name
        for x in computation.instructions.values():
            if x.operation.startswith("reduce-scatter") or any(
                callee.startswith("all-reduce-scatter") for callee in x.callees
            ):
                count += len(ARRAY.findall(x.shape))
    return count


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        ("qwen2.5-0.5b", "v5e:4x4"),
        ("qwen2.5-0.5b", "v5e:8x8"),
        ("qwen2.5-0.5b", "v5e:16x16"),
        ("qwen2.5-7b", "v5e:4x4"),
        ("qwen2.5-7b", "v5p:4x4x4"),
        ("qwen2.5-14b", "v5p:4x4x4"),
    ],
)
def test_no_device_sums_the_gradient_of_a_whole_matrix(name, topology):
    program, config, mesh = gradient_program(name, topology, 512)
    assert mesh["fsdp"] > LAYERS  # so that the parts of all layers are smaller than one matrix
    whole = {*matrices(config), config.vocab_size * config.hidden_size}
    sums = list(sums_on_every_device(program.text))
    assert sums and not whole.intersection(sums)
    assert scattered_matrices(program.text) >= len(matrices(config))
