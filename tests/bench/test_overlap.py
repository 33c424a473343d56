"""The benchmark of stale rollouts: its critical path, and a run of two kinds of rollouts."""

from __future__ import annotations

import json
import pathlib

import pytest
from flax import nnx

from jax_ragrl.bench import overlap
from jax_ragrl.bench.overlap import critical_path, medians
from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.models.hf import save_decoder
from tests.tiny import policy, tokenizer

FRESH = {"rollout_s": 10.0, "rollout/device_s": 3.0, "update_s": 4.0}


def test_stale_rollouts_hide_what_is_not_on_the_devices():
    assert critical_path(FRESH, 0) == 14
    assert critical_path(FRESH, 1) == 10
    # The devices run one program after another.
    assert critical_path(FRESH | {"update_s": 9.0}, 1) == 12


def test_one_slow_step_does_not_change_the_median():
    assert medians([{"step_s": 1.0}, {"step_s": 2.0}, {"step_s": 60.0}]) == {"step_s": 2.0}


def test_the_language_model_sleeps_in_both_runs(tmp_path: pathlib.Path, capsys, monkeypatch):
    sleeps, calls = [], []
    sleeping, measure = overlap._sleeping, overlap.measure_run

    def sleep(seconds: float):
        sleeps.append(seconds)
        return sleeping(seconds)

    def measure_run(*args):
        before, steps = len(sleeps), measure(*args)
        calls.append(len(sleeps) - before)
        return steps

    monkeypatch.setattr(overlap, "_sleeping", sleep)
    monkeypatch.setattr(overlap, "measure_run", measure_run)
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    settings = {"policy": folder, "data.world.size": 40, "run.questions_per_step": 2}
    settings |= {"index.kind": "exact", "run.staleness": 0}
    overrides = [f"--config.{name}={value}" for name, value in settings.items()]
    options = ["--latency=0.05", "--steps=3", "--json"]
    config = f"--config={CONFIGS / 'tiny' / 'c3po.py'}"
    assert main(["bench", "overlap", config, *overrides, *options]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["counted_steps"] == 1
    assert (result["fresh"]["staleness"], result["stale"]["staleness"]) == (0, 1)
    # On a busy host the rollout may have other causes to wait while the model sleeps.
    assert {*sleeps} == {0.05} and len(calls) == 2 and all(calls)
    # Without overlap, a step is its rollout and its update.
    assert result["fresh"]["ratio"] == pytest.approx(1, abs=0.1)


def test_a_run_without_counted_steps_is_refused(capsys):
    assert main(["bench", "overlap", f"--config={CONFIGS / 'tiny' / 'c3po.py'}", "--steps=2"]) == 2
    assert "--steps is 2: use more than 2" in capsys.readouterr().err
