"""Training that leaves its bounds stops, and its steps outside the bounds are not saved."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.roles import TOO_LONG
from jax_ragrl.run.guards import Guard, RunMonitor, is_comparable

BOUNDS = (("kl/mean", -1.0, 0.5), ("entropy", 0.01, 9.0))


def health(*steps: dict[str, float]) -> list[bool]:
    """Returns whether the run was healthy after each step."""
    monitor, healthy = RunMonitor(Guard(BOUNDS, patience=2), pathlib.Path("runs/x"), period=9), []
    for metrics in steps:
        monitor.check_metrics(metrics)
        healthy.append(monitor.is_healthy)
    return healthy


def test_a_metric_outside_its_bounds_stops_the_run():
    with pytest.raises(UserError, match=r"kl/mean is 0.9, .* -1 to 0.5 for 2 steps.*runs/x"):
        health({"kl/mean": 0.6}, {"kl/mean": 0.9, "entropy": 1.0})
    with pytest.raises(UserError, match="entropy is nan"):
        health({"entropy": 0.001}, {"entropy": float("nan")})


def test_only_consecutive_steps_outside_bounds_count():
    high, fine = {"kl/mean": 0.6, "entropy": 1.0}, {"kl/mean": 0.1, "entropy": 1.0}
    assert health(high, fine, high, fine) == [False, True, False, True]


def test_a_missing_metric_changes_nothing():
    high = {"kl/mean": 0.6}
    assert health({}, high, {}, {"kl/mean": 0.0}) == [True, False, False, True]
    assert health({"loss": 99.0}) == [True]


def test_a_bound_on_a_metric_never_logged_causes_a_warning():
    monitor = RunMonitor(Guard(BOUNDS), pathlib.Path("runs/x"), period=2)
    monitor.check_metrics({"kl/loss": 0.1, "entropy": 1.0})
    with pytest.warns(UserWarning, match=r"names kl/mean, .* has entropy, kl/loss") as warnings:
        monitor.check_metrics({"kl/loss": 0.1, "entropy": 1.0})
        monitor.check_metrics({"kl/loss": 0.1, "entropy": 1.0})
    assert len(warnings) == 1


def test_a_role_with_only_invalid_actions_causes_one_warning():
    monitor = RunMonitor(Guard(), pathlib.Path("runs/x"))
    metrics = {"valid_frac/planner": 0.0, "valid_frac/executor": 0.5, "invalid_action/No Plan": 9.0}
    with pytest.warns(UserWarning, match=r"of role planner .*No Plan.*warm start") as warnings:
        monitor.check_metrics(metrics)
        monitor.check_metrics(metrics)
    assert len(warnings) == 1


def test_too_long_prompts_cause_advice_on_lengths():
    metrics = {
        "valid_frac/filter": 0.0,
        f"invalid_action/{TOO_LONG}": 4.0,
        "invalid_action/No Plan": 1.0,
    }
    with pytest.warns(UserWarning, match="shapes.prompt_lengths") as warnings:
        RunMonitor(Guard(), pathlib.Path("runs/x")).check_metrics(metrics)
    assert len(warnings) == 1 and "warm start" not in str(warnings[0].message)


def test_a_role_with_some_valid_actions_causes_no_warning(recwarn):
    RunMonitor(Guard(), pathlib.Path("runs/x")).check_metrics({"valid_frac/planner": 0.01})
    assert not recwarn.list


@pytest.mark.parametrize("wrong", [Guard, lambda **k: Guard((("kl/mean", 1.0, 0.0),), **k)])
def test_empty_bounds_are_refused(wrong):
    with pytest.raises(UserError, match="lowest, highest"):
        wrong(patience=0) if wrong is Guard else wrong()


def test_a_last_step_outside_its_bounds_is_refused():
    monitor = RunMonitor(Guard(BOUNDS, patience=9), pathlib.Path("runs/x"))
    monitor.check_metrics({"kl/mean": 0.1, "entropy": 1.0})
    monitor.check_last()
    monitor.check_metrics({"kl/mean": 0.6, "entropy": 1.0})
    with pytest.raises(UserError, match=r"kl/mean is 0.6, outside -1 to 0.5.*--workdir=runs/x"):
        monitor.check_last()


@pytest.mark.parametrize(
    ("unscored", "comparable"), [(0, True), (1, True), (2, False), (9, False), (10, False)]
)
def test_evaluations_are_compared_if_nine_of_ten_questions_have_a_score(
    unscored: int, comparable: bool, recwarn: pytest.WarningsRecorder
):
    score_Q = np.array([np.nan] * unscored + [1.0] * (10 - unscored))
    assert is_comparable(score_Q, ("timed out",)) == comparable
    # Without any score, `check_evaluation` warns.
    assert len(recwarn.list) == (unscored in (2, 9))


def test_a_scored_evaluation_clears_an_earlier_failure():
    monitor = RunMonitor(Guard(), pathlib.Path("runs/x"))
    with pytest.warns(UserWarning, match="the judge gave no verdict"):
        monitor.check_evaluation(float("nan"), ())
    with pytest.raises(UserError, match="the judge gave no verdict"):
        monitor.check_last()
    monitor.check_evaluation(0.0, ("one question timed out",))
    monitor.check_last()
