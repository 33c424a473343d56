"""The coefficient of the KL divergence, adapted after each batch."""

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
    ceiling: float = math.inf,
) -> float:
    """Returns the next coefficient, moved towards the coefficient that holds `kl` at `target`.

      e = clip(kl / target - 1, -0.2, 0.2)
      next = clip(coefficient (1 + e batch / horizon), floor, ceiling)

    Ziegler et al. 2019, eq. 2; the floor and the default numbers are from MMOA-RAG's code, the
    ceiling is from its paper (table 6).

    Args:
      coefficient: the current coefficient.
      kl: nats per answer (the sum over its tokens), averaged over the batch. A nan leaves the
        coefficient as it is.
      batch: the number of answers in the batch.
      target: the divergence to hold, in nats per answer.
      horizon: the number of answers over which a constant error changes the coefficient by `e`.
      floor, ceiling: the smallest and the largest coefficient.
    """
    if math.isnan(kl):
        return coefficient
    error = min(max(kl / target - 1, -0.2), 0.2)
    return min(max(coefficient * (1 + error * batch / horizon), floor), ceiling)
