"""How an objective is descended: Adam, its schedule, and how often a rollout is used."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import optax

from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import UserError

SCHEDULES = ("constant", "linear", "cosine")
MOMENTS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """AdamW on a gradient clipped to a global norm; weights stay float32.

    The rate rises over the share `warmup` of all steps, then is constant or falls to the share
    `final` of its peak. `moments` is the dtype of the first moment. A rollout is split into
    `minibatches`, each used once in each of `epochs`.
    """

    policy_lr: float
    value_lr: float = 0.0
    schedule: str = "cosine"
    warmup: float = 0.0
    final: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.0
    moments: str = "float32"
    max_grad_norm: float = 1.0
    epochs: int = 1
    minibatches: int = 1

    def __post_init__(self) -> None:
        for name in ("policy_lr", "value_lr"):
            check_rate(f"optimizer.{name}", getattr(self, name))
        for name, choices in (("schedule", SCHEDULES), ("moments", MOMENTS)):
            one_of(f"optimizer.{name}", getattr(self, name), choices)
        for name in ("epochs", "minibatches"):
            if (value := getattr(self, name)) < 1:
                raise UserError(f"optimizer.{name} is {value}: nothing would be trained, use 1")
        if not 0 <= self.warmup < 1:
            raise UserError(
                f"optimizer.warmup is {self.warmup:g}: it is a share of all steps, 0 or more and "
                "below 1"
            )

    @property
    def steady(self) -> bool:
        """Whether the rate is one number, however long a run is."""
        return self.schedule == "constant" and self.warmup == 0

    def rate(self, peak: float, updates: int) -> optax.Schedule:
        """The learning rate of each optimizer step of a run of `updates` rollouts.

        It counts the steps that a run may take. Those not taken (of a rollout with fewer groups
        than minibatches or with none, or skipped for a gradient that is not finite) are not made
        up for: the rate then ends above `final`.
        """
        total = max(updates * self.epochs * self.minibatches, 1)
        rise = int(self.warmup * total)
        fall = max(total - rise, 1)
        after = {
            "constant": optax.constant_schedule(peak),
            "linear": optax.linear_schedule(peak, self.final * peak, fall),
            "cosine": optax.cosine_decay_schedule(peak, fall, alpha=self.final),
        }[self.schedule]
        if not rise:
            return after
        return optax.join_schedules([optax.linear_schedule(0.0, peak, rise), after], [rise])

    def transform(self, peak: float, updates: int) -> optax.GradientTransformation:
        """The optimizer of one model."""
        return _transform(self, peak, updates)


def check_rate(name: str, rate: float) -> None:
    """Raises `UserError` for a learning rate that is negative or not a finite float32."""
    if not 0 <= rate <= float(np.finfo(np.float32).max):
        raise UserError(
            f"{name} is {rate:g}: a learning rate is a finite number, 0 or more; use about 1e-6 "
            "for a pretrained policy"
        )


@functools.lru_cache(maxsize=64)
def _transform(o: Optimizer, peak: float, updates: int) -> optax.GradientTransformation:
    """Equal ones are one object, so that a step of equal models is compiled once."""
    rate = o.rate(peak, updates)
    adam = optax.adamw(rate, o.b1, o.b2, weight_decay=o.weight_decay, mu_dtype=o.moments)
    return optax.chain(optax.clip_by_global_norm(o.max_grad_norm), adam)
