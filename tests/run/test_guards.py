"""Training that leaves its bounds stops, and what it did there is not saved."""

from __future__ import annotations

import pathlib

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.policy import TOO_LONG
from jax_ragrl.run.guards import Guard, Watch

BOUNDS = (("kl/mean", -1.0, 0.5), ("entropy", 0.01, 9.0))


def watched(*steps: dict[str, float]) -> list[bool]:
    """Whether the run was well after each step."""
    watch, well = Watch(Guard(BOUNDS, patience=2), pathlib.Path("runs/x"), period=9), []
    for metrics in steps:
        watch.update(metrics)
        well.append(watch.well)
    return well


def test_a_metric_outside_its_bounds_for_long_enough_stops_the_run_and_is_named():
    with pytest.raises(UserError, match=r"kl/mean is 0.9, .* -1 to 0.5 for 2 steps.*runs/x"):
        watched({"kl/mean": 0.6}, {"kl/mean": 0.9, "entropy": 1.0})
    with pytest.raises(UserError, match="entropy is nan"):
        watched({"entropy": 0.001}, {"entropy": float("nan")})


def test_only_steps_in_a_row_count_and_one_that_is_outside_is_not_saved():
    high, fine = {"kl/mean": 0.6, "entropy": 1.0}, {"kl/mean": 0.1, "entropy": 1.0}
    assert watched(high, fine, high, fine) == [False, True, False, True]


def test_a_bound_is_within_itself():
    assert (
        watched({"kl/mean": 0.5, "entropy": 0.01}, {"kl/mean": -1.0, "entropy": 9.0}) == [True] * 2
    )


def test_a_metric_that_a_step_does_not_have_changes_nothing():
    high = {"kl/mean": 0.6}
    assert watched({}, high, {}, {"kl/mean": 0.0}) == [True, False, False, True]
    assert watched({"loss": 99.0}) == [True]


def test_a_metric_that_no_step_of_a_period_has_is_named():
    watch = Watch(Guard(BOUNDS), pathlib.Path("runs/x"), period=2)
    watch.update({"kl/loss": 0.1, "entropy": 1.0})
    with pytest.warns(UserWarning, match=r"names kl/mean, .* has entropy, kl/loss") as seen:
        watch.update({"kl/loss": 0.1, "entropy": 1.0})
        watch.update({"kl/loss": 0.1, "entropy": 1.0})
    assert len(seen) == 1


def test_a_role_that_writes_nothing_that_can_be_read_is_named_once():
    watch = Watch(Guard(), pathlib.Path("runs/x"))
    mute = {"valid_frac/planner": 0.0, "valid_frac/executor": 0.5, "malformed/No Plan": 9.0}
    with pytest.warns(UserWarning, match=r"of role planner .*No Plan.*warm start") as seen:
        watch.update(mute)
        watch.update(mute)
    assert len(seen) == 1


def test_where_prompts_do_not_fit_no_warm_start_is_advised():
    mute = {"valid_frac/filter": 0.0, f"malformed/{TOO_LONG}": 4.0, "malformed/No Plan": 1.0}
    with pytest.warns(UserWarning, match="shapes.lengths") as seen:
        Watch(Guard(), pathlib.Path("runs/x")).update(mute)
    assert len(seen) == 1 and "warm start" not in str(seen[0].message)


def test_a_role_that_can_be_read_now_and_then_is_nothing_to_warn_of(recwarn):
    Watch(Guard(), pathlib.Path("runs/x")).update({"valid_frac/planner": 0.01})
    assert not recwarn.list


@pytest.mark.parametrize("wrong", [Guard, lambda **k: Guard((("kl/mean", 1.0, 0.0),), **k)])
def test_bounds_that_hold_nothing_are_refused(wrong):
    with pytest.raises(UserError, match="lowest, highest"):
        wrong(patience=0) if wrong is Guard else wrong()


def test_a_last_step_outside_its_bounds_is_refused_and_names_each_metric():
    watch = Watch(Guard(BOUNDS, patience=9), pathlib.Path("runs/x"))
    watch.update({"kl/mean": 0.1, "entropy": 1.0})
    watch.check_last()
    watch.update({"kl/mean": 0.6, "entropy": 1.0})
    with pytest.raises(UserError, match=r"kl/mean is 0.6, outside -1 to 0.5.*--workdir=runs/x"):
        watch.check_last()


def test_an_evaluation_that_has_a_score_again_is_forgotten():
    watch = Watch(Guard(), pathlib.Path("runs/x"))
    with pytest.warns(UserWarning, match="the judge gave no verdict"):
        watch.evaluation(float("nan"), ())
    with pytest.raises(UserError, match="the judge gave no verdict"):
        watch.check_last()
    watch.evaluation(0.0, ("one question timed out",))
    watch.check_last()
