"""Tokens a second, and the share of the devices' peak."""

from __future__ import annotations

import types

import jax
import pytest

from jax_ragrl.learner.throughput import peak, speed


@pytest.mark.parametrize(
    "device, tera",
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
    ],
)
def test_the_peak_is_that_of_the_longest_name_that_fits(device, tera):
    assert peak(device) == tera * 1e12


def test_utilisation_is_of_every_policy_and_all_devices_of_a_mesh(monkeypatch):
    h200 = types.SimpleNamespace(device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [h200])
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    metrics = {"plan/flops": 989e12, "analysis/flops": 2 * 989e12, "plan/kl/mean": 7.0}
    one = speed(metrics, 100, 10.0, meshed=False)
    assert one == {"tokens_per_sec": 10.0, "mfu": pytest.approx(0.3)}
    assert speed(metrics, 100, 10.0, meshed=True)["mfu"] == pytest.approx(0.3 / 4)


def test_a_device_without_a_known_peak_has_no_utilisation():
    assert peak("cpu") is None
    assert speed({"flops": 1e12}, 100, 10.0, meshed=False) == {"tokens_per_sec": 10.0}
