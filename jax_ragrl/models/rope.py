"""Rotary position embedding with rotated halves, and its scalings for long contexts.

Feature i of the first half of a head and feature i of the second half form a pair, which is rotated
by `position * inv_freq[i]`.

Su et al. 2021 (arXiv 2104.09864); the scalings as in Transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated

import jax.numpy as jnp
import numpy as np
from annotated_types import Ge
from jax import Array

from jax_ragrl.config.ranges import Count, Positive
from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import UserError

SCALING_KINDS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    Fields:
      kind: `linear`, `llama3` or `yarn`.
      factor: the ratio of the new length to the trained one, at least 1.
      original_max_positions: the trained length (llama3, yarn).
      low_freq, high_freq: turns within the trained length below which a frequency is divided by the
        factor, and above which it is unchanged (llama3).
      beta_fast, beta_slow: turns at which the ramp over dimensions begins and ends (yarn).
      attention_factor: the factor on cosine and sine (yarn); None: 0.1 ln(factor) + 1.
      truncate: whether the ends of the ramp are rounded to dimensions (yarn).
    """

    kind: str
    factor: Annotated[float, Ge(1)]
    original_max_positions: Count = 8192
    low_freq: Positive = 1.0
    high_freq: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        one_of("rope scaling", self.kind, SCALING_KINDS)
        if self.factor < 1:
            raise UserError(
                f"rope scaling factor {self.factor} is below 1 and would shrink the context: "
                "give at least 1"
            )


def rope_tables(
    positions_BL: Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Array, Array]:
    """Returns cosine and sine of the rotation of every position, float32 `[B, L, F / 2]`."""
    inv_freq, gain = frequencies(head_dim, theta, scaling)
    angles = positions_BL.astype(jnp.float32)[..., None] * jnp.asarray(inv_freq)[None, None, :]
    return jnp.cos(angles) * jnp.float32(gain), jnp.sin(angles) * jnp.float32(gain)


def apply_rope(x_BLHF: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates the two halves of each head; float32 inside, the dtype of `x` outside."""
    cos, sin = (t[:, :, None, :] for t in tables)
    a, b = jnp.split(x_BLHF.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLHF.dtype)


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Returns the inverse frequencies, float32 `[F / 2]`, and the factor on cosine and sine."""
    # Float64 on the host: float32 powers would be off by several units in the last place.
    inv_freq = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    gain = 1.0
    if scaling is not None and scaling.kind == "linear":
        inv_freq = inv_freq / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        # Low frequencies are divided by the factor, high ones are left; between them is a mixture.
        turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
        width = scaling.high_freq - scaling.low_freq
        keep = np.clip((turns - scaling.low_freq) / width, 0.0, 1.0)
        inv_freq = (1 - keep) * inv_freq / scaling.factor + keep * inv_freq
    elif scaling is not None:
        inv_freq, gain = _yarn(inv_freq, head_dim, theta, scaling)
    return inv_freq.astype(np.float32), gain


def _yarn(
    inv_freq: np.ndarray, head_dim: int, theta: float, s: RopeScaling
) -> tuple[np.ndarray, float]:
    """YaRN, Peng et al. 2023 (arXiv 2309.00071): a ramp over dimensions, not over wavelengths."""

    # 1. The ramp: from the dimension that makes `beta_fast` turns within the trained length, where
    # frequencies are unchanged, to the one of `beta_slow` turns, from which they are divided.
    def dimension_of(turns: float) -> float:
        wave = s.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(theta))

    low, high = dimension_of(s.beta_fast), dimension_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # avoids a division by zero
    stretch = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    # 2. The factor on cosine and sine: the temperature of the attention scores.
    gain = s.attention_factor
    if gain is None:
        gain = 0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0
    return inv_freq / s.factor * stretch + inv_freq * (1 - stretch), gain
