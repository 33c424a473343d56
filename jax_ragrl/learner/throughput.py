"""Training speed: tokens per second, and the fraction of the devices' peak (MFU)."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jax_ragrl.learner.state import Policy
from jax_ragrl.runtime.free_work import count_elements
from jax_ragrl.runtime.topology import CEILINGS

# Peak bfloat16 operations per second by a prefix of JAX's name of the device; the longest matching
# prefix counts.
PEAKS = {
    "NVIDIA H100 PCIe": 756e12,
    **{f"NVIDIA {x.upper()}": CEILINGS[x].flops for x in ("a100", "h100", "h200", "b200")},
    **{name: x.flops for name, x in CEILINGS.items() if name.startswith("TPU")},
}


def peak_flops(device: str) -> float | None:
    """Returns the peak operations per second of a kind of device; None if unknown (a CPU)."""
    return PEAKS.get(max((name for name in PEAKS if device.startswith(name)), key=len, default=""))


def update_flops(policy: Policy, tokens: int) -> float:
    """Returns the operations of all epochs of an update of a policy and its critic.

    Counts six operations per trained parameter and token (Kaplan et al. 2020, arXiv 2001.08361),
    and four per frozen one, such as those below an adapter: they have no gradient. Scoring passes
    are not counted. `tokens` is the number of packed tokens.
    """
    spec, state = policy
    models = [(spec.policy, state.policy)]
    if spec.critic is not None and state.critic is not None:
        models.append((spec.critic, state.critic))
    per_token = sum(
        6 * count_elements(train.params) + 4 * count_elements(model.frozen)
        for model, train in models
    )
    return float(per_token) * tokens * spec.optimizer.epochs


def speed(
    metrics: Mapping[str, float], tokens: int, seconds: float, *, on_mesh: bool
) -> dict[str, float]:
    """Returns the metrics `tokens_per_sec` and, if the peak of the device is known, `mfu`.

    Args:
      metrics: of an update; the `flops` of all policies are added up.
      tokens: of all trained contexts; a prefix shared in a row counts for each of them.
      on_mesh: whether all devices worked on it; otherwise one did.
    """
    rate = {"tokens_per_sec": tokens / seconds}
    flops = sum(value for name, value in metrics.items() if name.split("/")[-1] == "flops")
    peak = peak_flops(jax.devices()[0].device_kind)
    if not flops or peak is None:
        return rate
    return rate | {"mfu": flops / seconds / peak / (jax.device_count() if on_mesh else 1)}
