"""Rotary position embedding in the half-rotation convention, with the scalings in use.

Su et al. 2021 (arXiv 2104.09864); the scalings as in Transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import UserError

KINDS = ("linear", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length.

    `linear` divides all by `factor`. `llama3` uses `low_freq`, `high_freq` and
    `original_max_positions`; `yarn` uses `beta_fast`, `beta_slow`, `truncate`,
    `original_max_positions` and `attention_factor` (`None`: 0.1 ln(factor) + 1).
    """

    kind: str
    factor: float
    original_max_positions: int = 8192
    low_freq: float = 1.0
    high_freq: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        one_of("rope scaling", self.kind, KINDS)
        if self.factor < 1:
            raise UserError(f"rope scaling factor {self.factor} is below 1: give at least 1")


def rope_tables(
    positions_BL: Array, head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[Array, Array]:
    """Cosine and sine, float32 `[B, L, F / 2]`, of int32 positions."""
    inv_freq, gain = frequencies(head_dim, theta, scaling)
    angles = positions_BL.astype(jnp.float32)[..., None] * jnp.asarray(inv_freq)[None, None, :]
    return jnp.cos(angles) * jnp.float32(gain), jnp.sin(angles) * jnp.float32(gain)


def apply_rope(x_BLHF: Array, tables: tuple[Array, Array]) -> Array:
    """Rotate the two halves of each head; float32 inside, the dtype of `x` outside."""
    cos, sin = (t[:, :, None, :] for t in tables)
    a, b = jnp.split(x_BLHF.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BLHF.dtype)


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> tuple[np.ndarray, float]:
    """Inverse frequencies, float32 `[F / 2]`, and the factor on cosine and sine."""
    inv_freq = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    gain = 1.0
    if scaling is not None and scaling.kind == "linear":
        inv_freq = inv_freq / scaling.factor
    elif scaling is not None and scaling.kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling)
    elif scaling is not None:
        inv_freq, gain = _yarn(inv_freq, head_dim, theta, scaling)
    return inv_freq.astype(np.float32), gain


def _llama3(inv_freq: np.ndarray, s: RopeScaling) -> np.ndarray:
    """Long waves are divided by the factor, short ones kept, those between interpolated."""
    turns = s.original_max_positions * inv_freq / (2 * math.pi)
    keep = np.clip((turns - s.low_freq) / (s.high_freq - s.low_freq), 0.0, 1.0)
    return (1 - keep) * inv_freq / s.factor + keep * inv_freq


def _yarn(
    inv_freq: np.ndarray, head_dim: int, theta: float, s: RopeScaling
) -> tuple[np.ndarray, float]:
    """Peng et al. 2023 (arXiv 2309.00071): a ramp over dimensions instead of wavelengths."""

    def dimension_of(turns: float) -> float:
        wave = s.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(theta))

    low, high = dimension_of(s.beta_fast), dimension_of(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001  # the ramp must not be a division by zero
    stretch = np.clip((np.arange(head_dim // 2) - low) / width, 0.0, 1.0)
    gain = s.attention_factor
    if gain is None:
        gain = 0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0
    return inv_freq / s.factor * stretch + inv_freq * (1 - stretch), gain
