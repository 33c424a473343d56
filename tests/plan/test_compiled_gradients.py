"""Gradients compiled for described TPUs: each device sums the columns that it owns, and no others.

They need libtpu, which compiles without a device. Layers are equal, so that two stand for all.
"""

import dataclasses
import math
from collections.abc import Iterator

import pytest

from jax_ragrl.learner.objective import Objective
from jax_ragrl.models.config import DecoderConfig, layer_weights
from jax_ragrl.models.published import published_config
from jax_ragrl.plan import ALL_DEVICES
from jax_ragrl.plan.abstract_arrays import Program
from jax_ragrl.plan.hlo import ARRAY, parse
from jax_ragrl.plan.policies import PlannedPolicy, _gradient_program
from jax_ragrl.runtime.sharding import data_parallel_size, make_mesh
from jax_ragrl.runtime.topology import describe_devices

pytestmark = pytest.mark.slow
LAYERS = 2


@pytest.fixture(autouse=True)
def devices_that_are_not_present(monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")


def gradient_program(
    name: str, topology: str, length: int
) -> tuple[Program, DecoderConfig, dict[str, int]]:
    """The gradient of a row per device, on the mesh that the configs of the papers choose."""
    config = dataclasses.replace(
        published_config(name), dtype="bfloat16", num_layers=LAYERS, remat="full"
    )
    mesh = make_mesh(ALL_DEVICES, describe_devices(topology), config.hidden_size)
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
