"""The optimizer of a warm-up: Muon for matrices and Adam for the rest."""

from __future__ import annotations

from typing import Any

import jax
import optax


def muon(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """Returns Muon (Jordan et al. 2024) for matrices and Adam for the rest, with cosine decay.

    Args:
      learning_rate: peak learning rate, which is reached after a tenth of the steps, at most 100.
      steps: the number of all steps.
    """
    warmup = min(100, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps, 0.0)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule,
            adam_learning_rate=lambda step: 0.3 * schedule(step),
            adam_b2=0.98,
            muon_weight_dimension_numbers=_matrices,
            consistent_rms=0.2,
        ),
    )


def _matrices(params: Any) -> Any:
    """Returns the row and column axes of the stacked layer weights that are matrices."""
    axes = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), ((1,), (2, 3))),
        "o_proj": ((1, 2), (3,)),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), ((1,), (2,))),
    }

    def of(path: Any, _: Any) -> Any:
        name = next((n for n in axes if n in jax.tree_util.keystr(path)), None)
        return optax.contrib.MuonDimensionNumbers(*axes[name]) if name else None

    return jax.tree_util.tree_map_with_path(of, params)
