"""Leading indicators of a collapse: pure functions of the metrics of a run.

A run collapses if the learning rate is too high, nothing holds the policy near its reference, a
reward pays for a form without content, or a role stops to act. The reward shows it late. An
indicator is a metric, compared with a threshold: as it is, with the median of its first steps, or
with the best median so far. `observe` folds one row of `metrics.jsonl` after the other into a
`History`, so that a resumed run, which reads the rows again, decides as a whole one does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jax_ragrl.config.ranges import Positive
from jax_ragrl.config.schema import one_of
from jax_ragrl.run.metric_names import metric_of

OFF, WARN, UNDO, STOP = ACTIONS = ("off", "warn", "undo", "stop")
# Of the learning rate, at each undone update. After half of a rate that is far too high, the next
# update may be below the threshold and still ruin the policy.
UNDO_FACTOR = 0.25
UNDOS = 4  # in a row, after which the rate is at 1/256; the next one stops the run
SEARCHES = 0.5  # per rollout at the start, below which a system hardly searches anyway
# Nats per token at the start, below which a role hardly chose: its entropy may fall further.
ENTROPY = 0.02


@dataclasses.dataclass(frozen=True)
class Limit:
    """The threshold of an indicator, and what happens beyond it.

    Fields:
      threshold: the value beyond which the indicator is wrong; `run.indicators` has its unit. NaN:
        the default of the indicator.
      action: `off`; `warn`; `undo` (the update is undone, and the rate is a quarter from then on;
        the fifth one in a row stops the run); `stop`. Empty: the default of the indicator.
    """

    threshold: Positive = math.nan
    action: str = ""

    def __post_init__(self) -> None:
        if self.action:
            one_of("guard: action", self.action, ACTIONS)


class Trend(NamedTuple):
    """One metric of a run: its first and newest values, at most `baseline_steps` of each.

    `best` is the highest median of `recent`, `streak` counts steps in a row beyond the threshold.
    """

    first: tuple[float, ...] = ()
    recent: tuple[float, ...] = ()
    best: float = -math.inf
    streak: int = 0

    @property
    def baseline(self) -> float:
        return statistics.median(self.first)


class Indicator(NamedTuple):
    """An indicator of a collapse.

    Fields:
      metric: the name of the metric, or of a family of metrics, each of which is compared.
      measure: from the value of a step and the trend to the number that is compared; None: the
        comparison has no meaning for this run.
      is_low: whether the number is wrong below its threshold, and not above it.
      meaning: the number in words, for messages.
      is_relative: whether the comparison needs the first steps of the run.
      acts_at_once: whether one step beyond the threshold is an incident, whatever `patience` is.
      needs_fresh: whether steps with stale rollouts are left out.
    """

    metric: str
    measure: Callable[[float, Trend], float | None]
    is_low: bool
    meaning: str
    is_relative: bool = True
    acts_at_once: bool = False
    needs_fresh: bool = False


class Incident(NamedTuple):
    """An indicator beyond its threshold, for as many steps as its action waits.

    `step` counts completed steps, `indicator` is its key in `guard`, `number` is what was compared,
    `action` one of `ACTIONS`, and `message` all of it in words.
    """

    step: int
    indicator: str
    metric: str
    value: float
    number: float
    threshold: float
    action: str
    message: str


class History(NamedTuple):
    """Trends by indicator and metric after some rows, and the factor of the learning rate."""

    trends: Mapping[tuple[str, str], Trend] = MappingProxyType({})
    rate_factor: float = 1.0


def _itself(value: float, trend: Trend) -> float:
    del trend
    return value


def _ratio(value: float, trend: Trend, least: float = 0.0) -> float | None:
    return value / trend.baseline if trend.baseline > least else None


def _of_highest(value: float, trend: Trend, least: float) -> float | None:
    # Not the median: a rate far too high ends the searches after the first step.
    highest = max(trend.first)
    return value / highest if highest > least else None


def _fall(value: float, trend: Trend) -> float:
    return trend.baseline - value


def _of_best(value: float, trend: Trend) -> float | None:
    return value / trend.best if trend.best > 0 else None


INDICATORS: Mapping[str, Indicator] = {
    "logp_rewarded": Indicator(
        "logp_rewarded/<role>", _fall, False, "nats per token below its first steps"
    ),
    "valid_frac": Indicator("valid_frac/<role>", _of_best, True, "of its best steps"),
    # One such update may be the end of a policy, which later updates hardly move.
    "update_kl": Indicator("update_kl/mean", _itself, False, "nats per token", False, True),
    "kl": Indicator("kl/mean", _itself, False, "nats per token", False),
    "entropy": Indicator(
        "entropy/old/<role>", functools.partial(_ratio, least=ENTROPY), True, "of its first steps"
    ),
    "dead_groups": Indicator("frac_reward_zero_std", _itself, False, "of the questions", False),
    # The reward of the first step is as wrong as that of any other.
    "reward_order": Indicator(
        "reward_order", _itself, True, "of the pairs of a right and a wrong answer", False, True
    ),
    "searches": Indicator(
        "searches_per_rollout",
        functools.partial(_of_highest, least=SEARCHES),
        True,
        "of the most in its first steps",
    ),
    "grad_norm": Indicator("grad_norm", _ratio, False, "times its first steps"),
    # A stale gap includes the update in between, which may move one token of a batch by nats.
    "sampler_gap": Indicator("sampler_gap/max", _itself, False, "nats", False, needs_fresh=True),
    # The threshold is above the noise of one evaluation, and the next one is many steps away.
    "dev_drop": Indicator("eval/drop", _itself, False, "standard errors", False, True),
}


@functools.lru_cache(maxsize=4096)
def _family(key: str) -> str:
    metric = metric_of(key)
    return metric.name if metric else ""


def with_value(trend: Trend, value: float, steps: int) -> Trend:
    """Returns a trend with the value of a further step; `steps` are in a baseline or median."""
    recent = (*trend.recent, value)[-steps:]
    # Fewer values are too noisy: one lucky step would be the best one for ever.
    best = max(trend.best, statistics.median(recent)) if len(recent) == steps else trend.best
    return trend._replace(first=(*trend.first, value)[:steps], recent=recent, best=best)


def number_of(indicator: Indicator, value: float, trend: Trend, steps: int) -> float | None:
    """Returns the number that is compared with a threshold; None before `steps` first steps."""
    # A rate that is far too high ruins a policy within these steps: `kl` must not wait.
    is_ready = len(trend.first) == steps or not indicator.is_relative
    return indicator.measure(value, trend) if is_ready else None


def is_beyond(indicator: Indicator, number: float | None, threshold: float) -> bool:
    """Whether the number of an indicator, as `number_of` returns it, is beyond its threshold."""
    if number is None:
        return False
    return number < threshold if indicator.is_low else number > threshold


def applies(indicator: Indicator, row: Mapping[str, Any]) -> bool:
    """Whether an indicator looks at the row of a step, which may have stale rollouts."""
    return not (indicator.needs_fresh and row.get("staleness"))


def observe(
    limits: Mapping[str, Limit], patience: int, steps: int, history: History, row: Mapping[str, Any]
) -> tuple[History, tuple[Incident, ...]]:
    """Folds the row of a step into the history of a run; returns it with the incidents of the step.

    `patience` steps in a row beyond a threshold make an incident, except that `undo` does not wait;
    relative indicators compare with the first `steps`.
    """
    trends, incidents = dict(history.trends), list[Incident]()
    for name, limit in limits.items():
        if limit.action == OFF or not applies(INDICATORS[name], row):
            continue
        for key, value in row.items():
            if _family(key) != INDICATORS[name].metric or value is None or not math.isfinite(value):
                continue
            trend = trends.get((name, key), Trend())
            number = number_of(INDICATORS[name], value, trend, steps)
            beyond = is_beyond(INDICATORS[name], number, limit.threshold)
            # Compared before it is added, so that a value has no part in its own baseline.
            trend = trend._replace(streak=trend.streak + 1 if beyond else 0)
            waits = 1 if INDICATORS[name].acts_at_once else patience
            action = action_of(limit, trend.streak, waits)
            if action and number is not None:
                incidents.append(_incident(row["step"], name, key, value, number, limit, action))
            trends[name, key] = with_value(trend, value, steps)
    # Once, also if two roles moved too far. The trends stay: undone updates are counted in a row.
    is_undone = UNDO in (incident.action for incident in incidents)
    factor = history.rate_factor * (UNDO_FACTOR if is_undone else 1.0)
    return History(trends, factor), tuple(incidents)


def action_of(limit: Limit, streak: int, patience: int) -> str:
    """Returns the action after `streak` consecutive steps beyond a threshold; empty: none."""
    # An update is undone now or never.
    if limit.action == UNDO and streak:
        return STOP if streak > UNDOS else UNDO
    # Once per row of steps: a warning in each of them would hide the first one.
    return limit.action if streak == patience else ""


def _incident(
    step: int, name: str, key: str, value: float, number: float, limit: Limit, action: str
) -> Incident:
    side = "below" if INDICATORS[name].is_low else "above"
    message = (
        f"guard.{name} at step {step}: {key} is {value:.4g}, which is {number:.3g} "
        f"{INDICATORS[name].meaning} and {side} {limit.threshold:g}; action: {action}"
    )
    if limit.action == UNDO and action == STOP:
        message += f", because {UNDOS} updates in a row were undone before"
    return Incident(step, name, key, value, number, limit.threshold, action, message)


def may_save(limits: Mapping[str, Limit], history: History) -> bool:
    """Whether a step may become a checkpoint: not on the way to a stop."""
    return not any(
        trend.streak and limits[name].action == STOP for (name, _), trend in history.trends.items()
    )
