"""Operations from shapes, least times from data sheets, counts of programs, checkpoint sizes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_ragrl.learner.objective import KL, Objective
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Layout
from jax_ragrl.models.config import DecoderConfig, abstract_params, param_count
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.lora import LoRAConfig, adapter_weights
from jax_ragrl.plan.operations import (
    gradient_flops,
    head_flops,
    layer_weight_count,
    layers_flops,
    score_flops,
    time_at_least,
)
from jax_ragrl.plan.policies import PlannedPolicy
from jax_ragrl.plan.speed import checkpoint_bytes, count_programs, least_times, update_passes
from jax_ragrl.runtime.sharding import make_mesh
from jax_ragrl.runtime.topology import CEILINGS, GPUS, TPU_MEMORY, Ceilings
from jax_ragrl.sampling.sampler import Shapes

ONE_LAYER = DecoderConfig(512, 256, 1024, 1, 4, 2, 64, attention_impl="xla")
GROUP = Objective(critic="none", advantage="group_normalised", kl=KL("none", "k3"))
OWN = Objective(critic="own", kl=KL("reward", "k1"))
ADAM = Optimizer(1e-3)


def test_the_operations_of_a_forward_pass_are_those_of_its_program():
    """XLA's count has element-wise operations too; with one layer it counts no loop once."""
    rows, length = 2, 64

    def forward(params: Any, ids: jax.Array) -> jax.Array:
        decoder = Decoder.from_params(ONE_LAYER, params)
        return decoder.logits(decoder(ids, ids, None)[0])

    ids = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    counted = jax.jit(forward).lower(abstract_params(ONE_LAYER), ids).cost_analysis()["flops"]
    per_token = layers_flops(ONE_LAYER, length) + head_flops(ONE_LAYER)
    assert per_token * rows * length == pytest.approx(counted, rel=0.05)


def test_a_gradient_is_three_forward_passes_remat_adds_layers_and_adapters_need_no_base():
    length = 64
    plain = gradient_flops(ONE_LAYER, length, adapters=False)
    full = dataclasses.replace(ONE_LAYER, remat="full")
    assert plain == 3 * score_flops(ONE_LAYER, length)
    more = gradient_flops(full, length, adapters=False) - plain
    assert more == layers_flops(ONE_LAYER, length / 2)
    whole, adapters = (gradient_flops(ONE_LAYER, 64, adapters=flag) for flag in (False, True))
    assert whole - adapters == 2 * layer_weight_count(ONE_LAYER) + head_flops(ONE_LAYER)


def test_every_described_device_has_a_data_sheet():
    assert CEILINGS.keys() == GPUS.keys() | TPU_MEMORY.keys()


@pytest.mark.parametrize(
    ("flops", "moved", "sent", "bound", "seconds"),
    [(300, 10, 1, "compute", 3), (100, 50, 1, "memory", 5), (100, 10, 7, "network", 7)],
)
def test_the_slowest_resource_bounds_a_program(flops, moved, sent, bound, seconds):
    collectives = {"all-gather": {"count": 1, "bytes": sent}}
    work = {"flops": flops, "hbm_bytes": moved, "collectives": collectives}
    time = time_at_least(work, Ceilings(100, 10, 1))
    assert time == {"seconds_at_least": seconds, "bound": bound}


def test_tokens_per_second_are_those_of_all_devices():
    work = {"flops": 100.0, "hbm_bytes": 0, "collectives": {}}
    update = {"rows": [8, 16], **work}
    # Two hosts of two devices, each with a batch of its own.
    sampling = {"devices": 2, "prompts": [4, 32], "width": 2, "prefill": work, "decode_step": work}
    sampling["prefill_tokens"] = 4 * 32
    times = least_times(update, sampling, 4, Ceilings(100, 1, 1))
    rates = {name: times[name]["tokens_per_s_at_most"] for name in times if name != "ceilings"}
    assert rates == {"gradient": 8 * 16, "prefill": 2 * 4 * 32, "decode_step": 2 * 4 * 2}


def test_the_passes_of_an_update_follow_the_objective():
    one = update_passes(ONE_LAYER, GROUP, ADAM, 64, lora=False)
    assert (one["gradients"], one["scores"]) == (1, 0)
    # Old and reference log-probabilities, and the values of the critic.
    more = update_passes(ONE_LAYER, OWN, dataclasses.replace(ADAM, epochs=2), 64, lora=False)
    assert (more["gradients"], more["scores"]) == (4, 3)
    score = score_flops(ONE_LAYER, 64)
    assert more["flops_per_token"] == 4 * one["flops_per_token"] + 3 * score
    # The guard scores the batch once more after the update.
    measured = update_passes(ONE_LAYER, GROUP, ADAM, 64, lora=False, is_measured=True)
    assert measured["scores"] == 1


def test_every_shape_and_cache_size_is_a_program():
    shapes = Shapes(prompt_lengths=(32, 64), batch_sizes=(4, 16), max_new_tokens=64)
    packing = Layout(row_lengths=(512, 1024), tokens_per_device=4096)
    mesh = make_mesh((1, 1, 1), jax.devices()[:1])
    programs = count_programs(shapes, packing, GROUP, 1, mesh)
    # Two lengths, two batches; rows from 1024 tokens on have a plain form too; score and gradient.
    assert programs == {"sampler": 2 * 2 * 2, "update": 3 * 2}
    longer = dataclasses.replace(shapes, max_new_tokens=256)
    assert count_programs(longer, packing, OWN, 1, mesh) == {"sampler": 12, "update": 12}
    # One continuation per prompt and several; a question's first prompts are equal.
    assert count_programs(longer, packing, OWN, 4, mesh)["sampler"] == 24
    assert count_programs(longer, packing, OWN, 1, mesh, rollouts=2)["sampler"] > 12


def test_a_checkpoint_has_weights_moments_reference_and_critic():
    count, adapter = param_count(ONE_LAYER), LoRAConfig(2, targets=("up_proj",))
    trained = sum(jnp.zeros(w.shape).size for w in adapter_weights(ONE_LAYER, adapter).values())
    plain, lora = (PlannedPolicy("", ONE_LAYER, lora) for lora in (None, adapter))
    assert checkpoint_bytes({"a": plain}, GROUP, ADAM) == 12 * count
    assert checkpoint_bytes({"a": plain}, OWN, ADAM) == (24 + 4) * count
    assert checkpoint_bytes({"a": lora, "b": lora}, GROUP, ADAM) == 2 * 12 * trained
