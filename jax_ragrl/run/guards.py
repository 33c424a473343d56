"""What stops a run: an environment that answers nothing, and training that leaves its bounds."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
import warnings
from collections.abc import Mapping, Sequence

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.policy import TOO_LONG
from jax_ragrl.rollout.tree import Forest

LONGER = "raise the longest of shapes.lengths and of layout.lengths, or give fewer passages"
WARMER = (
    "this policy does not know the form, and may never find it. Begin from a warm start (ragrl "
    "warmup, or ragrl demos and ragrl sft)"
)
OUTAGE = 5  # steps in a row in which every question failed, once one was answered


@dataclasses.dataclass(frozen=True)
class Guard:
    """Bounds of metrics, each (name, lowest, highest): where one is outside for `patience` steps in
    a row, or nan, the run stops. A metric that a step does not have is not looked at.

    Collapse shows early in `kl/mean`, `entropy`, `valid_frac/<role>` and `zero_variance_frac`.
    """

    bounds: tuple[tuple[str, float, float], ...] = ()
    patience: int = 3

    def __post_init__(self) -> None:
        wrong = [bound for bound in self.bounds if not bound[1] < bound[2]]
        if wrong or self.patience < 1:
            raise UserError(
                f"guard.bounds {wrong} and guard.patience {self.patience}: a bound is (metric, "
                "lowest, highest), and patience at least 1 step"
            )


class Watch:
    """Looks at each step of a run. A step after which `well` is False is not to be saved: started
    again, a run that stopped takes it once more. What is logged at all, every `period` steps is."""

    def __init__(self, guard: Guard, workdir: pathlib.Path, period: int = 1):
        self._guard, self._workdir = guard, workdir
        self._unseen, self._until = {name for name, _, _ in guard.bounds}, period
        self._lost, self._answered = 0, False
        self._failure, self._unscored = "", ""
        self._outside = collections.Counter[str]()
        self._excess = dict[str, str]()
        self._begun = False

    @property
    def well(self) -> bool:
        """Whether the environment answered and every metric was within its bounds."""
        return not self._lost and not self._outside

    def rollout(self, forest: Forest) -> None:
        """Raises `UserError` where the environment has answered nothing for `OUTAGE` steps, or in
        the first one: an address may be wrong."""
        lost = len(forest.failed) == len(forest.questions)
        self._lost, self._answered = self._lost + 1 if lost else 0, self._answered or not lost
        self._failure = forest.failures[-1] if lost else ""
        if self._lost == (OUTAGE if self._answered else 1):
            steps = f"{OUTAGE} steps in a row" if self._answered else "the first step"
            raise UserError(
                f"every question of {steps} failed, the last with: "
                f"{self._failure}. See to it, and start again with --workdir={self._workdir}:"
                " the run goes on from its last checkpoint, where it has one"
            )

    def evaluation(self, score: float, failures: Sequence[str]) -> None:
        """Warns of an evaluation that has no score, which the last step must have."""
        why = failures[-1] if failures else "the judge gave no verdict"
        self._unscored = "" if math.isfinite(score) else why
        if self._unscored:
            warnings.warn(f"no dev question could be scored, the last with: {why}", stacklevel=2)

    def check_last(self) -> None:
        """Checks that the last step of a run may be saved.

        Raises:
          UserError: every question of the step or of its evaluation failed, or a metric is outside
            its bounds. Saved, the step would count as done, and no later start would repeat it.
        """
        reasons = [self._excess[name] for name in sorted(self._outside)]
        if self._unscored:
            reasons.insert(0, f"no dev question could be scored, the last with: {self._unscored}")
        if self._lost:
            reasons.insert(0, f"every question of the step failed, the last with: {self._failure}")
        if reasons:
            raise UserError(
                f"the last step is not saved: {'; '.join(reasons)}. Fix the cause and start the "
                f"same command again with --workdir={self._workdir}: the run continues from its "
                "last good checkpoint, if it has one, and repeats the steps after it"
            )

    def update(self, metrics: Mapping[str, float]) -> None:
        """Raises `UserError` where a metric has been outside its bounds for too long, and warns of
        one that the first `period` steps do not have: its name may be wrong. Warns too of a role
        whose actions are all malformed where the run begins."""
        if not self._begun:
            _warn_of_mute(metrics)
        self._begun = True
        self._unseen, self._until = self._unseen - metrics.keys(), self._until - 1
        if self._unseen and self._until == 0:
            known = ", ".join(sorted(metrics))
            warnings.warn(
                f"guard.bounds names {', '.join(sorted(self._unseen))}, which no step has had yet, "
                f"so that nothing is guarded there; this one has {known}",
                stacklevel=2,
            )
        for name, lowest, highest in self._guard.bounds:
            if name in metrics and not lowest <= metrics[name] <= highest:
                self._outside[name] += 1
                bounds = f"{lowest:g} to {highest:g}"
                self._excess[name] = f"{name} is {metrics[name]:.4g}, outside {bounds}"
            elif name in metrics:
                del self._outside[name]
            if self._outside[name] == self._guard.patience:
                raise UserError(
                    f"{name} is {metrics[name]:.4g}, and was outside {lowest:g} to {highest:g} for "
                    f"{self._guard.patience} steps in a row: training has left its bounds. The "
                    f"newest checkpoint of {self._workdir} is from before; 'ragrl export' makes a "
                    "policy of it, from which a run with a lower rate or a higher KL can start"
                )


def _warn_of_mute(metrics: Mapping[str, float]) -> None:
    """Warns of roles that write nothing but malformed actions."""
    prefix, faults = "valid_frac/", [key for key in metrics if key.startswith("malformed/")]
    mute = [k.removeprefix(prefix) for k, x in metrics.items() if k.startswith(prefix) and x == 0]
    if mute:
        most = max(faults, key=lambda key: metrics[key], default="malformed/?").partition("/")[2]
        told = (
            f"not one action of role {', '.join(mute)} could be read (of all roles mostly {most})"
        )
        advice = LONGER if most == TOO_LONG else WARMER
        warnings.warn(f"{told}: {advice}", stacklevel=3)
