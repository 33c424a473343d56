"""The benchmark of stale rollouts: its critical path, and a run of two kinds of rollouts."""

from __future__ import annotations

import json
import pathlib

import pytest
from flax import nnx

from jax_ragrl.bench import overlap
from jax_ragrl.bench.overlap import SleepingLLM, critical_path, medians
from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.llm.base import NoLLM
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.rollout import collect
from jax_ragrl.types import LLMRequest
from tests.tiny import policy, tokenizer

FRESH = {"rollout_s": 10.0, "rollout/device_s": 3.0, "update_s": 4.0}


def test_stale_rollouts_hide_what_is_not_on_the_devices():
    assert critical_path(FRESH, 0) == 14
    assert critical_path(FRESH, 1) == 10
    # The devices run one program after another.
    assert critical_path(FRESH | {"update_s": 9.0}, 1) == 12


def test_one_slow_step_does_not_change_the_median():
    assert medians([{"step_s": 1.0}, {"step_s": 2.0}, {"step_s": 60.0}]) == {"step_s": 2.0}


def test_exponential_latencies_are_a_function_of_the_seed():
    requests = [LLMRequest("answer", (), seed=seed) for seed in range(999)]
    llm = SleepingLLM(NoLLM(), 2.0, True)
    seconds = [llm.seconds(request) for request in requests]
    assert seconds == [llm.seconds(request) for request in requests]
    assert sum(seconds) / len(seconds) == pytest.approx(2, abs=0.2) and max(seconds) > 8
    assert SleepingLLM(NoLLM(), 2.0, False).seconds(requests[0]) == 2


def test_the_language_model_sleeps_in_all_runs(tmp_path: pathlib.Path, capsys, monkeypatch):
    sleeps, calls, early = [], [], []
    seconds, measure, run_all = SleepingLLM.seconds, overlap.measure_run, collect.Scheduler.run

    def sleep(self, request):
        sleeps.append(seconds(self, request))
        return sleeps[-1]

    def measure_run(*args):
        before, steps = len(sleeps), measure(*args)
        calls.append((len(sleeps) - before, len(early)))
        return steps

    def count_early(self, live):
        if not self.lockstep:
            early.append(len(sleeps))
        run_all(self, live)

    monkeypatch.setattr(collect.Scheduler, "run", count_early)
    monkeypatch.setattr(SleepingLLM, "seconds", sleep)
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
    modes = ("fresh", "stale", "early", "stale_and_early")
    assert [result[mode]["staleness"] for mode in modes] == [0, 1, 0, 1]
    # On a busy host the rollout may have other causes to wait while the model sleeps.
    assert {*sleeps} == {0.05} and all(count for count, _ in calls)
    # The third and fourth run have no lockstep, in each of their three steps.
    assert [count for _, count in calls] == [0, 0, 3, 6]
    # Without overlap, a step is its rollout and its update.
    assert result["fresh"]["ratio"] == pytest.approx(1, abs=0.1)


def test_a_run_without_counted_steps_is_refused(capsys):
    assert main(["bench", "overlap", f"--config={CONFIGS / 'tiny' / 'c3po.py'}", "--steps=2"]) == 2
    assert "--steps is 2: use more than 2" in capsys.readouterr().err
