"""Run guards: stop a run whose environment fails, or whose training diverges."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.config.ranges import Bound, Count
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.roles import TOO_LONG
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.indicators import INDICATORS, OFF, UNDO, WARN, History, Incident, Limit, observe

ADVICE_TOO_LONG = (
    "raise the longest of shapes.prompt_lengths and of packing.row_lengths, or use fewer passages"
)
ADVICE_FORMAT = (
    "this policy does not know the format, and may never learn it from rewards. Begin from a warm "
    "start (ragrl warmup tiny, or ragrl warmup demos and ragrl warmup sft)"
)
NO_VERDICT = "the judge gave no verdict"
OUTAGE = 5  # consecutive steps in which every question failed, after a step with answers
# Of the questions of an evaluation; with a smaller share of scores the mean decides nothing.
SCORED_SHARE = 0.9


@dataclasses.dataclass(frozen=True)
class Guard:
    """Bounds of metrics, which stop a diverging run, and leading indicators of a collapse.

    Each indicator has a threshold and an action (`run.indicators`). By default an update that moves
    a policy too far is undone, and the other indicators warn.

    Fields:
      bounds: triples (metric, lowest, highest). A metric that a step does not have is not checked.
      patience: the run stops if a metric is outside its bounds, or nan, for this number of
        consecutive steps. An indicator acts after as many steps beyond its threshold.
      baseline_steps: the first steps of the run or of a phase, whose median is the baseline of
        relative indicators, which do not act before.
      logp_rewarded: the fall of a role's `logp_rewarded`, in nats per token.
      valid_frac: the `valid_frac` of a role, as a fraction of its best.
      update_kl: `update_kl/mean`, how far one update moved a policy, in nats per token. It is
        measured after the update and before the policy acts. Off, it costs nothing; `undo` keeps
        a copy of the trained state in host memory.
      kl: `kl/mean`, in nats per token.
      entropy: the `entropy/old` of a role, as a fraction of the first steps.
      dead_groups: `frac_reward_zero_std`, the fraction of questions that teach nothing.
      reward_order: `reward_order`, the fraction of pairs of a right and a wrong answer of which the
        right one has the higher reward.
      searches: `searches_per_rollout`, as a fraction of the highest of the first steps.
      grad_norm: `grad_norm`, in multiples of the first steps.
      sampler_gap: `sampler_gap/max` of fresh rollouts, in nats.
      dev_drop: the best dev score so far minus this one, in standard errors of their difference.
    """

    bounds: tuple[tuple[str, Bound, Bound], ...] = ()
    patience: Count = 3
    baseline_steps: Count = 3
    logp_rewarded: Limit = Limit(1.5)
    valid_frac: Limit = Limit(0.5)
    update_kl: Limit = Limit(1.0, UNDO)
    kl: Limit = Limit(1.0)
    entropy: Limit = Limit(0.05)
    dead_groups: Limit = Limit(0.95)
    reward_order: Limit = Limit(0.5)
    searches: Limit = Limit(0.1)
    grad_norm: Limit = Limit(20.0)
    sampler_gap: Limit = Limit(2.0)
    dev_drop: Limit = Limit(2.5)

    @property
    def limits(self) -> dict[str, Limit]:
        """The threshold and action of each indicator."""
        return {name: getattr(self, name) for name in INDICATORS}

    @property
    def can_act(self) -> bool:
        """Whether an indicator may change or end the training, and not only warn."""
        return any(limit.action not in (OFF, WARN) for limit in self.limits.values())

    def observe(
        self, history: History, row: Mapping[str, Any]
    ) -> tuple[History, tuple[Incident, ...]]:
        return observe(self.limits, self.patience, self.baseline_steps, history, row)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            limit = getattr(self, field.name)
            if isinstance(limit, Limit):
                default: Any = field.default
                is_own = not math.isnan(limit.threshold)
                threshold = limit.threshold if is_own else default.threshold
                limit = Limit(threshold, limit.action or default.action or WARN)
                object.__setattr__(self, field.name, limit)
        wrong = [triple for triple in self.bounds if not triple[1] < triple[2]]
        if wrong or self.patience < 1:
            raise UserError(
                f"guard.bounds {wrong} and guard.patience {self.patience}: a bound is (metric, "
                "lowest, highest), and patience at least 1 step"
            )
        for name, why in (
            ("dev_drop", "an evaluation does not say which update was wrong"),
            ("reward_order", "no update mends a reward that does not follow the answers"),
        ):
            if getattr(self, name).action == UNDO:
                raise UserError(f"guard.{name}.action is 'undo', but {why}: use warn or stop")


def is_comparable(score_Q: np.ndarray, failures: Sequence[str]) -> bool:
    """Whether enough questions have a score that the mean may be compared with other evaluations.

    Warns if some have one, but too few: those that an outage spares may all be easy ones. `score_Q`
    is nan for questions without a score.
    """
    is_scored_Q = np.isfinite(score_Q)
    if is_scored_Q.mean() >= SCORED_SHARE:
        return True
    if is_scored_Q.any():
        reason = failures[-1] if failures else NO_VERDICT
        warnings.warn(
            f"only {is_scored_Q.sum()} of {len(score_Q)} dev questions could be scored, the last "
            f"failure was: {reason}. Below {100 * SCORED_SHARE:.0f} % the evaluation decides "
            "nothing: its mean is not logged, and the best policies and run.patience ignore it",
            stacklevel=3,
        )
    return False


class RunMonitor:
    """Checks each step of a run and stops the run if it fails.

    A step after which `is_healthy` is False must not be saved: the resumed run repeats it.
    """

    def __init__(self, guard: Guard, workdir: pathlib.Path, period: int = 1):
        """Warns of bounds on metrics that the first `period` steps do not log."""
        self._bounds = guard.bounds
        self._patience, self._workdir = guard.patience, workdir
        self._unlogged, self._steps_left = {name for name, *_ in self._bounds}, period
        self._failed_steps, self._has_answered = 0, False
        self._failure, self._evaluation_failure = "", ""
        self._steps_outside = collections.Counter[str]()
        self._excess = dict[str, str]()
        self._is_first_step = True

    @property
    def is_healthy(self) -> bool:
        """Whether the environment answered and every metric was within its bounds."""
        return not self._failed_steps and not self._steps_outside

    def check_rollout(self, forest: Forest) -> None:
        """Raises `UserError` if every question failed for `OUTAGE` steps, or in the first step."""
        # A few failures are normal, for example of questions that a server rejects.
        has_failed = forest.has_failed
        self._failed_steps = self._failed_steps + 1 if has_failed else 0
        self._has_answered = self._has_answered or not has_failed
        self._failure = forest.failures[-1] if has_failed else ""
        # Before the first answer, waiting is useless: the settings are probably wrong.
        if self._failed_steps == (OUTAGE if self._has_answered else 1):
            steps = f"{OUTAGE} steps in a row" if self._has_answered else "the first step"
            raise UserError(
                f"every question of {steps} failed, the last with: {self._failure}. Fix the cause "
                f"and start the same command again with --workdir={self._workdir}: the run "
                "continues from its last checkpoint, if it has one"
            )

    def check_evaluation(self, score: float, failures: Sequence[str]) -> None:
        """Warns if an evaluation has no score (nan); see `check_last` for the last step."""
        reason = failures[-1] if failures else NO_VERDICT
        self._evaluation_failure = "" if math.isfinite(score) else reason
        if self._evaluation_failure:
            warnings.warn(f"no dev question could be scored, the last with: {reason}", stacklevel=2)

    def check_last(self) -> None:
        """Checks that the last step of a run may be saved, after which it is never repeated.

        `UserError` if every question of the step or of its evaluation failed, or a metric is
        outside its bounds.
        """
        # Any metric outside its bounds counts here, without patience: no later step can recover.
        reasons = [self._excess[name] for name in sorted(self._steps_outside)]
        if self._evaluation_failure:
            failure = self._evaluation_failure
            reasons.insert(0, f"no dev question could be scored, the last with: {failure}")
        if self._failed_steps:
            reasons.insert(0, f"every question of the step failed, the last with: {self._failure}")
        if reasons:
            raise UserError(
                f"the last step is not saved: {'; '.join(reasons)}. Fix the cause and start the "
                f"same command again with --workdir={self._workdir}: the run continues from its "
                "last good checkpoint, if it has one, and repeats the steps after it"
            )

    def check_metrics(self, metrics: Mapping[str, float], *, last: bool = False) -> None:
        """Checks the bounds of the metrics of a step.

        Warns if a bounded metric has not been logged within the first period (its name may be
        wrong), and in the first step if a role's actions are all invalid. `UserError` if a metric
        was outside its bounds for too many consecutive steps, or as in `check_last`.
        """
        if self._is_first_step:
            _warn_if_all_invalid(metrics)
        self._is_first_step = False
        self._unlogged, self._steps_left = self._unlogged - metrics.keys(), self._steps_left - 1
        if self._unlogged and self._steps_left == 0:
            names, keys = ", ".join(sorted(self._unlogged)), ", ".join(sorted(metrics))
            warnings.warn(
                f"guard.bounds names {names}, which no step has logged yet, so these bounds have "
                f"no effect; this step has {keys}",
                stacklevel=2,
            )
        for name, lowest, highest in self._bounds:
            self._check_bound(name, lowest, highest, metrics)
        if last:
            self.check_last()

    def _check_bound(
        self, name: str, lowest: float, highest: float, metrics: Mapping[str, float]
    ) -> None:
        if name not in metrics:
            return
        if lowest <= metrics[name] <= highest:  # False for nan
            del self._steps_outside[name]  # which a Counter need not have
            return
        self._steps_outside[name] += 1
        value, bounds = f"{name} is {metrics[name]:.4g}", f"{lowest:g} to {highest:g}"
        self._excess[name] = f"{value}, outside {bounds}"
        if self._steps_outside[name] == self._patience:
            raise UserError(
                f"{value}, and was outside {bounds} for {self._patience} steps in a row: training "
                f"has left its bounds. The newest checkpoint of {self._workdir} is from before; "
                "'ragrl export' makes a policy of it, from which a run with a lower rate or a "
                "higher KL can start"
            )


def _warn_if_all_invalid(metrics: Mapping[str, float]) -> None:
    prefix, errors = "valid_frac/", [key for key in metrics if key.startswith("invalid_action/")]
    roles = [k.removeprefix(prefix) for k, x in metrics.items() if k.startswith(prefix) and x == 0]
    if roles:
        # The most frequent error decides which advice helps.
        key = max(errors, key=lambda key: metrics[key], default="invalid_action/?")
        error = key.partition("/")[2]
        advice = ADVICE_TOO_LONG if error == TOO_LONG else ADVICE_FORMAT
        warnings.warn(
            f"every action of role {', '.join(roles)} is invalid (most frequent error of all "
            f"roles: {error}): {advice}",
            stacklevel=3,
        )
