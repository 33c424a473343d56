"""Training that leaves its bounds stops; metrics and indicators of a collapse have their laws."""

import pathlib
from collections.abc import Sequence

import numpy as np
import pytest

from jax_ragrl.config.schema import build
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.roles import TOO_LONG
from jax_ragrl.run.guards import Guard, RunMonitor, is_comparable
from jax_ragrl.run.indicators import INDICATORS, UNDOS, History, Incident, Limit, may_save
from jax_ragrl.run.metric_names import METRICS, metric_of
from jax_ragrl.training.rollout_metrics import describe_rollout
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, play

BOUNDS = (("kl/mean", -1.0, 0.5), ("entropy", 0.01, 9.0))


def health(*steps: dict[str, float]) -> list[bool]:
    monitor, healthy = RunMonitor(Guard(BOUNDS, patience=2), pathlib.Path("runs/x"), period=9), []
    for metrics in steps:
        monitor.check_metrics(metrics)
        healthy.append(monitor.is_healthy)
    return healthy


def test_a_metric_outside_its_bounds_in_consecutive_steps_stops_the_run():
    with pytest.raises(UserError, match=r"kl/mean is 0.9, .* -1 to 0.5 for 2 steps.*runs/x"):
        health({"kl/mean": 0.6}, {"kl/mean": 0.9, "entropy": 1.0})
    with pytest.raises(UserError, match="entropy is nan"):
        health({"entropy": 0.001}, {"entropy": float("nan")})
    high, fine = {"kl/mean": 0.6, "entropy": 1.0}, {"kl/mean": 0.1, "entropy": 1.0}
    assert health(high, fine, high, fine) == [False, True, False, True]
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


def test_a_role_with_only_invalid_actions_causes_one_warning_with_advice():
    monitor = RunMonitor(Guard(), pathlib.Path("runs/x"))
    metrics = {"valid_frac/planner": 0.0, "valid_frac/executor": 0.5, "invalid_action/No Plan": 9.0}
    with pytest.warns(UserWarning, match=r"of role planner .*No Plan.*warm start") as warnings:
        monitor.check_metrics(metrics)
        monitor.check_metrics(metrics)
    assert len(warnings) == 1
    metrics = {
        "valid_frac/filter": 0.0,
        f"invalid_action/{TOO_LONG}": 4.0,
        "invalid_action/No Plan": 1.0,
    }
    with pytest.warns(UserWarning, match="shapes.prompt_lengths") as warnings:
        RunMonitor(Guard(), pathlib.Path("runs/x")).check_metrics(metrics)
    assert len(warnings) == 1 and "warm start" not in str(warnings[0].message)


@pytest.mark.parametrize("wrong", [Guard, lambda **k: Guard((("kl/mean", 1.0, 0.0),), **k)])
def test_empty_bounds_are_refused(wrong):
    with pytest.raises(UserError, match="lowest, highest"):
        wrong(patience=0) if wrong is Guard else wrong()


def test_a_last_step_outside_its_bounds_or_without_a_score_is_refused():
    monitor = RunMonitor(Guard(BOUNDS, patience=9), pathlib.Path("runs/x"))
    monitor.check_metrics({"kl/mean": 0.1, "entropy": 1.0})
    monitor.check_last()
    monitor.check_metrics({"kl/mean": 0.6, "entropy": 1.0})
    with pytest.raises(UserError, match=r"kl/mean is 0.6, outside -1 to 0.5.*--workdir=runs/x"):
        monitor.check_last()
    monitor = RunMonitor(Guard(), pathlib.Path("runs/x"))
    with pytest.warns(UserWarning, match="the judge gave no verdict"):
        monitor.check_evaluation(float("nan"), ())
    with pytest.raises(UserError, match="the judge gave no verdict"):
        monitor.check_last()
    monitor.check_evaluation(0.0, ("one question timed out",))
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


# By indicator: a metric, its values in a healthy run, and those after a collapse.
COLLAPSES = {
    "logp_rewarded": ("logp_rewarded/planner", (-0.5, -0.4, -0.9, -0.6, -1.2), -2.8),
    "valid_frac": ("valid_frac/planner", (0.8, 0.9, 1.0, 0.7, 0.6), 0.3),
    "update_kl": ("update_kl/mean", (0.0, 0.018, 0.33, 0.002, 0.16), 4.04),
    "kl": ("kl/mean", (0.0, 0.1, 0.2, 0.05, 0.4), 1.5),
    "entropy": ("entropy/old/planner", (0.9, 0.8, 0.7, 0.5, 0.3), 0.01),
    "dead_groups": ("frac_reward_zero_std", (0.1, 0.5, 0.4, 0.9, 0.6), 1.0),
    "reward_order": ("reward_order", (1.0, 0.9, 1.0, 0.7, 0.8), 0.2),
    "searches": ("searches_per_rollout", (1.5, 1.0, 2.0, 0.5, 3.0), 0.0),
    "grad_norm": ("grad_norm", (1.0, 0.5, 3.0, 9.0, 2.0), 40.0),
    "sampler_gap": ("sampler_gap/max", (0.01, 0.7, 0.1, 0.05, 0.0), 3.0),
    "dev_drop": ("eval/drop", (-2.0, 0.5, -1.0, 1.2, 0.9), 3.1),
}
# Indicators that wait for steps in a row, and those that do not.
PATIENT = [name for name in COLLAPSES if not INDICATORS[name].acts_at_once]
PROMPT = ["update_kl", "reward_order", "dev_drop"]
SETTINGS = {"baseline_steps": 3, "patience": 2}


def replay(guard: Guard, rows: Sequence[dict[str, float]]) -> tuple[History, list[Incident]]:
    history, incidents = History(), list[Incident]()
    for step, row in enumerate(rows, start=1):
        history, step_incidents = guard.observe(history, {"step": step, **row})
        incidents += step_incidents
    return history, incidents


def limited(name: str, action: str, **settings: int) -> Guard:
    """Returns the default threshold of one indicator with another action, and no others."""
    threshold = getattr(Guard(), name).threshold
    others = {other: Limit(1.0, "off") for other in INDICATORS if other != name}
    return Guard(**others, **{name: Limit(threshold, action)}, **(SETTINGS | settings))


def test_every_indicator_is_a_metric_of_the_table_and_has_a_collapse():
    names = {metric.name for metric in METRICS}
    assert {indicator.metric for indicator in INDICATORS.values()} <= names
    assert INDICATORS.keys() == COLLAPSES.keys() == Guard().limits.keys()
    for name in ("", "reward", "reward/", "earned/plan", "valid_frac", "x/reward/mean", "eval/f1"):
        assert metric_of(name) is None, name


@pytest.mark.parametrize("name", INDICATORS)
def test_the_number_of_an_incident_is_never_read_as_a_metric_of_an_indicator(name: str):
    metric = metric_of(f"guard/incident/{name}")
    assert metric is not None and metric.name == "guard/incident/<indicator>"


@pytest.mark.parametrize("name", PROMPT)
def test_an_indicator_above_its_noise_waits_for_no_second_step(name: str):
    key, healthy, collapsed = COLLAPSES[name]
    rows = [{key: value} for value in (*healthy, collapsed, collapsed, healthy[0], collapsed)]
    _, incidents = replay(limited(name, "warn"), rows)
    assert [(x.step, x.action) for x in incidents] == [(6, "warn"), (9, "warn")]
    _, incidents = replay(limited(name, "stop"), rows)
    assert [(x.step, x.action) for x in incidents] == [(6, "stop"), (9, "stop")]


def test_a_gap_of_stale_rollouts_is_no_incident():
    """It includes the update in between; in fresh rollouts the sampler alone explains it."""
    rows = [{"sampler_gap/max": 3.0, "kl/mean": 1.5}] * 6
    stale = [{**row, "staleness": float(step > 0)} for step, row in enumerate(rows)]
    guard = Guard(**SETTINGS)
    assert {x.indicator for x in replay(guard, rows)[1]} == {"sampler_gap", "kl"}
    assert {x.indicator for x in replay(guard, stale)[1]} == {"kl"}


def test_an_update_is_undone_until_the_rate_is_low_enough_and_not_for_ever():
    key, healthy, collapsed = COLLAPSES["update_kl"]
    rows = [{key: value} for value in (*healthy, collapsed, collapsed, healthy[0])]
    history, incidents = replay(limited("update_kl", "undo"), rows)
    assert [x.action for x in incidents] == ["undo"] * 2 and history.rate_factor == 1 / 16
    assert may_save(limited("update_kl", "undo").limits, history)
    _, incidents = replay(limited("update_kl", "undo"), [{key: collapsed}] * (UNDOS + 1))
    assert [x.action for x in incidents] == ["undo"] * UNDOS + ["stop"]
    assert f"{UNDOS} updates in a row were undone" in incidents[-1].message


def test_an_action_alone_keeps_the_threshold_and_a_threshold_alone_the_action():
    guard = build(Guard, {"kl": {"action": "stop"}, "update_kl": {"threshold": 0.1}})
    assert guard.kl == Limit(Guard().kl.threshold, "stop")
    assert guard.update_kl == Limit(0.1, "undo") and Guard(kl=Limit(2.0)).kl == Limit(2.0, "warn")


@pytest.mark.parametrize("name", PATIENT)
def test_a_collapse_is_an_incident_after_patience_steps_and_health_is_none(name: str):
    key, healthy, collapsed = COLLAPSES[name]
    rows = [{key: value} for value in healthy]
    _, incidents = replay(Guard(**SETTINGS), rows)
    assert not incidents
    _, incidents = replay(Guard(**SETTINGS), rows + [{key: collapsed}])
    assert not incidents, "one step may be noise"
    _, incidents = replay(Guard(**SETTINGS), rows + [{key: collapsed}] * 4)
    assert [(x.step, x.indicator, x.action) for x in incidents] == [(7, name, "warn")]
    assert key in incidents[0].message and f"guard.{name}" in incidents[0].message


@pytest.mark.parametrize("name", PATIENT)
def test_an_interrupted_collapse_is_no_incident(name: str):
    key, healthy, collapsed = COLLAPSES[name]
    rows = [*healthy, collapsed, healthy[0], collapsed, healthy[0]]
    assert not replay(Guard(**SETTINGS), [{key: value} for value in rows])[1]


@pytest.mark.parametrize("name", COLLAPSES)
def test_only_an_absolute_indicator_acts_during_the_first_steps_and_none_that_is_off(name: str):
    key, healthy, collapsed = COLLAPSES[name]
    rows = [{key: value} for value in (*healthy, *[collapsed] * 5)]
    guard = Guard(baseline_steps=len(rows), patience=1)
    assert bool(replay(guard, rows)[1]) != INDICATORS[name].is_relative
    assert not replay(limited(name, "off"), rows)[1]


@pytest.mark.parametrize("name", PATIENT)
def test_a_missing_value_and_one_that_is_not_finite_say_nothing(name: str):
    key, healthy, collapsed = COLLAPSES[name]
    rows = [{key: value} for value in healthy]
    gap = [{}, {key: None}, {key: float("nan")}]
    assert not replay(Guard(**SETTINGS), rows + gap * 2)[1]
    # Such a step neither ends nor lengthens a streak.
    rows += [{key: collapsed}, *gap, {key: collapsed}]
    assert [x.step for x in replay(Guard(**SETTINGS), rows)[1]] == [len(rows)]


def test_each_role_policy_and_critic_has_its_own_history():
    rows = [{"valid_frac/a": 0.9, "valid_frac/b": 0.4, "plan/kl/mean": 0.1}] * 4
    rows += [{"valid_frac/a": 0.4, "valid_frac/b": 0.4, "plan/kl/mean": 2.0}] * 2
    _, incidents = replay(Guard(**SETTINGS), rows)
    assert [x.metric for x in incidents] == ["valid_frac/a", "plan/kl/mean"]
    rows = [{"value/grad_norm": value} for value in (1.0, 1.0, 1.0, 99.0, 99.0)]
    assert not replay(Guard(**SETTINGS), rows)[1]


def test_searches_that_end_are_an_incident_unless_a_system_hardly_searches():
    for key, value in (("searches_per_rollout", 0.4), ("entropy/old/filter", 0.01)):
        assert not replay(Guard(**SETTINGS), [{key: value}] * 4 + [{key: 0.0}] * 4)[1]
    rows = [{"searches_per_rollout": value} for value in (1.0, 0.05, 0.05, 0.0, 0.0)]
    assert [x.step for x in replay(Guard(**SETTINGS), rows)[1]] == [5]


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_a_step_beyond_a_threshold_is_no_place_to_return_to(action: str):
    guard = limited("kl", action)
    beyond, _ = replay(guard, [{"kl/mean": value} for value in (0, 0, 0, 2)])
    after, _ = replay(guard, [{"kl/mean": value} for value in (0, 0, 0, 2, 0)])
    assert may_save(guard.limits, beyond) == (action == "warn")
    assert may_save(guard.limits, after)


def test_a_history_read_again_from_its_rows_goes_on_equally():
    guard = limited("kl", "undo")
    rows = [{"kl/mean": value} for value in (0, 0, 0, 2, 2, 0, 2, 2, 2)]
    for stop in range(len(rows)):
        history, _ = replay(guard, rows[:stop])
        for step, row in enumerate(rows[stop:], start=stop + 1):
            history, _ = guard.observe(history, {"step": step, **row})
        assert history == replay(guard, rows)[0]


def test_an_unknown_action_and_a_threshold_without_meaning_are_refused():
    with pytest.raises(UserError, match="'explode': use one of off, warn, undo, stop"):
        Limit(1.0, "explode")
    with pytest.raises(UserError, match=r"guard\.kl\.threshold is 0"):
        build(Guard, {"kl": {"threshold": 0.0}}, "guard")
    for name in ("reward_order", "dev_drop"):  # no update mends a reward or an evaluation
        with pytest.raises(UserError, match=rf"guard\.{name}\.action is"):
            Guard(**{name: Limit(0.5, "undo")})


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("kl/mean", "kl/mean"),
        ("plan/kl/mean", "kl/mean"),
        ("kl/router", "kl/<role>"),
        ("kl/loss", "kl/loss"),
        ("value/grad_norm", "value/grad_norm"),
        ("plan/advantage/std/plan", "advantage/std/<role>"),
        ("unanswered/Out of Turns / Rewrites", "unanswered/<reason>"),
        ("frac_reward_zero_std", "frac_reward_zero_std"),
    ],
)
def test_a_key_belongs_to_the_most_specific_pattern(key, name):
    metric = metric_of(key)
    assert metric is not None and metric.name == name


def test_all_rollout_metrics_are_listed():
    forest = play(Tape(improvise), ANN, BOB, expander=PAPER)
    metrics = describe_rollout(forest, np.ones(len(forest.records)), lambda f: {"x": f.reward_N})
    assert len(metrics) > 15
    assert [key for key in metrics if metric_of(key) is None] == []
