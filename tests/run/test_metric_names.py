"""The table of metric names is complete and unambiguous."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.run.build import build_components
from jax_ragrl.run.load import load_job
from jax_ragrl.run.metric_names import METRICS, metric_of
from jax_ragrl.training.loop import train
from jax_ragrl.training.rollout_metrics import describe_rollout
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, play
from tests.tiny import policy, tokenizer


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


@pytest.mark.slow
def test_a_run_logs_no_metric_outside_the_table(tmp_path):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    changes = {"policy": folder, "data.world.size": 40, "run.steps": 1, "run.dev_questions": 2}
    changes |= {"run.questions_per_step": 2, "objective.kl.where": "reward"}
    overrides = [f"--config.{key}={value}" for key, value in changes.items()]
    job = load_job(load_config(CONFIGS / "tiny" / "c3po.py", overrides))
    train(job, build_components(job, tmp_path), tmp_path)
    _, row = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert {"reward/mean", "kl/mean", "eval/accuracy", "time/train_s"} <= row.keys()
    assert [key for key in row if key != "step" and metric_of(key) is None] == []
