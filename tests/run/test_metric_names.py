"""The table of metric names is complete and unambiguous."""

from __future__ import annotations

import numpy as np
import pytest

from jax_ragrl.run.metric_names import METRICS, metric_of
from jax_ragrl.training.rollout_metrics import describe_rollout
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, play


def test_every_metric_is_listed_once_with_unit_and_meaning():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.unit and metric.meaning and metric_of(metric.name) == metric


def test_names_outside_the_table_are_not_metrics():
    for name in ("", "reward", "reward/", "earned/plan", "valid_frac", "x/reward/mean", "eval/f1"):
        assert metric_of(name) is None, name


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
