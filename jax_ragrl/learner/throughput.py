"""How fast a step trained: tokens a second, and the share of what the devices could have done."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jax_ragrl.learner.state import Models, Trainer

# Operations a second in bfloat16, as the makers state them, by how JAX's name of a device begins:
# the longest of these that fits. A chip of TPU7x is two devices.
PEAKS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "TPU v4": 275e12,
    "TPU v5": 459e12,
    "TPU v5 lite": 197e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12 / 2,
}


def peak(device: str) -> float | None:
    """Operations a second of a kind of device; None where it is not known, as of a CPU."""
    return PEAKS.get(max((name for name in PEAKS if device.startswith(name)), key=len, default=""))


def operations(trainer: Trainer, models: Models, tokens: int) -> float:
    """Operations of the epochs of an update: six a parameter and token, as is usual (Kaplan et al.
    2020, arXiv 2001.08361), of policy and critic. What scores before it is not counted."""
    kept = [trainer.policy.frozen, models.policy.params]
    if trainer.critic is not None and models.critic is not None:
        kept += [trainer.critic.frozen, models.critic.params]
    return 6.0 * sum(x.size for x in jax.tree.leaves(kept)) * tokens * trainer.optimizer.epochs


def speed(
    metrics: Mapping[str, float], tokens: int, seconds: float, *, meshed: bool
) -> dict[str, float]:
    """`tokens_per_sec` of all trained contexts, those that share a row counted each, and `mfu`: the
    `flops` of all policies in `metrics` over the peak of a device (`meshed`: of all), if known."""
    rate = {"tokens_per_sec": tokens / seconds}
    flops = sum(value for name, value in metrics.items() if name.split("/")[-1] == "flops")
    known = peak(jax.devices()[0].device_kind)
    if not flops or known is None:
        return rate
    return rate | {"mfu": flops / seconds / known / (jax.device_count() if meshed else 1)}
