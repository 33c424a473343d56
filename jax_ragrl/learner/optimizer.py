"""The optimizer: AdamW, its learning-rate schedule, and the reuse of each rollout."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import optax

from jax_ragrl.config.ranges import BelowOne, Count, NotNegative, Positive, Share
from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import UserError

SCHEDULES = ("constant", "linear", "cosine")
MOMENTS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on a clipped gradient; weights stay float32.

    Fields:
      policy_lr, value_lr: peak learning rates of policies and of separate critics.
      schedule: `constant`, `linear` or `cosine`, after the warmup.
      warmup_fraction: fraction of all steps in which the rate rises linearly from 0.
      final_lr_fraction: rate at the last step, as a fraction of its peak; not for `constant`.
      b1, b2, weight_decay: parameters of AdamW.
      moment_dtype: dtype of the first moment; the second is float32.
      max_grad_norm: global norm to which a gradient is clipped.
      epochs: passes over each rollout.
      minibatches: optimizer steps per pass.
    """

    policy_lr: NotNegative
    value_lr: NotNegative = 0.0
    schedule: str = "cosine"
    warmup_fraction: BelowOne = 0.0
    final_lr_fraction: Share = 0.1
    b1: BelowOne = 0.9
    b2: BelowOne = 0.999
    weight_decay: NotNegative = 0.0
    moment_dtype: str = "float32"
    max_grad_norm: Positive = 1.0
    epochs: Count = 1
    minibatches: Count = 1

    def __post_init__(self) -> None:
        for name in ("policy_lr", "value_lr"):
            check_rate(f"optimizer.{name}", getattr(self, name))
        for name, choices in (("schedule", SCHEDULES), ("moment_dtype", MOMENTS)):
            one_of(f"optimizer.{name}", getattr(self, name), choices)

    @property
    def steady(self) -> bool:
        """Whether the rate is the same at every step and independent of the length of the run."""
        return self.schedule == "constant" and self.warmup_fraction == 0

    def rate(self, peak: float, updates: int) -> optax.Schedule:
        """Returns the learning rate as a function of the optimizer step.

        The schedule covers the largest number of steps of a run of `updates` rollouts; if fewer are
        taken, the final rate is not reached.
        """
        # A policy without updates has total 0, which the cosine schedule refuses.
        total = max(updates * self.epochs * self.minibatches, 1)
        rise = int(self.warmup_fraction * total)
        fall = max(total - rise, 1)
        after = {
            "constant": optax.constant_schedule(peak),
            "linear": optax.linear_schedule(peak, self.final_lr_fraction * peak, fall),
            "cosine": optax.cosine_decay_schedule(peak, fall, alpha=self.final_lr_fraction),
        }[self.schedule]
        if not rise:
            return after
        return optax.join_schedules([optax.linear_schedule(0.0, peak, rise), after], [rise])

    def transform(self, peak: float, updates: int) -> optax.GradientTransformation:
        """Returns the optimizer of one model; equal settings give the same object."""
        return _transform(self, peak, updates)


def check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= float(np.finfo(np.float32).max):
        raise UserError(
            f"{name} is {rate:g}: a learning rate is a finite number, 0 or more; use about 1e-6 "
            "for a pretrained policy"
        )


@functools.lru_cache(maxsize=64)
def _transform(o: Optimizer, peak: float, updates: int) -> optax.GradientTransformation:
    # One object, so that `apply` is compiled once for both models.
    rate = o.rate(peak, updates)
    adam = optax.adamw(rate, o.b1, o.b2, weight_decay=o.weight_decay, mu_dtype=o.moment_dtype)
    # Clipping comes first, so that the moments never see an outlier.
    return optax.chain(optax.clip_by_global_norm(o.max_grad_norm), adam)
