"""Tokens per second, and the fraction of the devices' peak."""

import dataclasses
import types

import jax
import pytest
from flax import nnx

from jax_ragrl.learner.throughput import peak_flops, speed, update_flops
from jax_ragrl.models.config import param_count
from jax_ragrl.models.lora import LoRAConfig, add_lora
from tests.learner.bigram import DEEP, PPO, PPO_ADAM, deep, prepared


@pytest.mark.parametrize(
    "device, tera",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
    ],
)
def test_the_longest_matching_name_has_priority(device, tera):
    assert peak_flops(device) == tera * 1e12


def test_mfu_covers_all_policies_and_devices_of_a_known_peak(monkeypatch):
    assert peak_flops("cpu") is None
    assert speed({"flops": 1e12}, 100, 10.0, on_mesh=False) == {"tokens_per_sec": 10.0}
    h200 = types.SimpleNamespace(device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [h200])
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    metrics = {"plan/flops": 989e12, "analysis/flops": 2 * 989e12, "plan/kl/mean": 7.0}
    one = speed(metrics, 100, 10.0, on_mesh=False)
    assert one == {"tokens_per_sec": 10.0, "mfu": pytest.approx(0.3)}
    assert speed(metrics, 100, 10.0, on_mesh=True)["mfu"] == pytest.approx(0.3 / 4)


def test_frozen_weights_below_an_adapter_have_no_gradient():
    """Four operations per weight of the base and six per weight of the adapter, in both models."""
    decoder = add_lora(deep(), LoRAConfig(2, targets=("up_proj",)), rngs=nnx.Rngs(0))
    policy = prepared(PPO, dataclasses.replace(PPO_ADAM, epochs=3), decoder)
    width, base = DEEP.hidden_size, param_count(DEEP)
    adapter = 2 * (width + DEEP.intermediate_size)  # A and B of one layer
    head, value = DEEP.vocab_size * width, width + 1  # the critic has a value head instead
    actor, critic = 6 * adapter + 4 * base, 6 * (adapter + value) + 4 * (base - head)
    assert update_flops(policy, 10) == 3 * 10 * (actor + critic)
