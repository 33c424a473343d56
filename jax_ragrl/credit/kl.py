"""The coefficient of the KL divergence: a number that a run fixes, or adapts after each batch."""

from __future__ import annotations

import math


def adapt(
    coefficient: float,
    kl: float,
    batch: int,
    *,
    target: float = 6.0,
    horizon: float = 10_000,
    floor: float = 0.05,
) -> float:
    """The next coefficient, moved towards the one that holds `kl` at `target`.

      e = clip(kl / target - 1, -0.2, 0.2),   next = max(coefficient (1 + e batch / horizon), floor)

    Ziegler et al. 2019, eq. 2; the floor and the numbers are those of MMOA-RAG's code.

    Args:
      kl: nats a whole answer (the sum over its tokens), averaged over the batch. A nan leaves the
        coefficient as it is.
      batch: answers in the batch; `horizon` is counted in answers too.
    """
    if math.isnan(kl):
        return coefficient
    error = min(max(kl / target - 1, -0.2), 0.2)
    return max(coefficient * (1 + error * batch / horizon), floor)
