"""Experiment trackers in addition to the log of a run."""

import importlib.util
import math
import sys
import types
from typing import Any

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.run.config import TRACKERS, Run
from jax_ragrl.training.log import Log
from jax_ragrl.training.trackers import Trackers

METRICS = {"reward/mean": 0.5, "time/rollout_s": 1.0, "time/train_s": 2.0}


def stand_in(monkeypatch, name: str, **functions: Any) -> None:
    """Replaces a package by a module with functions."""
    module = types.ModuleType(name)
    for key, value in functions.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, name, module)


def test_every_tracker_has_a_key_and_a_package():
    assert TRACKERS.keys() == Run(1).projects.keys()


def test_weights_and_biases_continues_one_run(tmp_path, monkeypatch):
    inits, log_of_calls = [], []
    run = types.SimpleNamespace(
        log=lambda metrics, step: log_of_calls.append((step, metrics)),
        finish=lambda: log_of_calls.append("end"),
    )
    stand_in(monkeypatch, "wandb", init=lambda **arguments: inits.append(arguments) or run)
    (tmp_path / "config.json").write_text('{"seed": 3}')
    for start in (0, 1):
        log = Log(tmp_path, start, 2, {"wandb_project": "mine"})
        log.write(start + 1, METRICS, None)
        log.close()
    assert log_of_calls == [(1, METRICS), "end", (2, METRICS), "end"] and inits[0] == inits[1]
    assert inits[0]["resume"] == "allow" and inits[0]["project"] == "mine"
    assert inits[0]["config"] == {"seed": 3}
    Log(tmp_path, 2, 2).close()
    assert len(inits) == 2


@pytest.mark.parametrize("key", TRACKERS)
def test_a_missing_package_is_refused_early(key, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not any(Run(1).projects.values())
    with pytest.raises(UserError, match=f"run.{key} is 'mine'.*pip install {TRACKERS[key]}"):
        Run(1, **{key: "mine"})


def test_mlflow_continues_one_run_and_gets_no_nan(tmp_path, monkeypatch):
    starts, calls = [], []

    def start_run(**arguments):
        starts.append(arguments)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc"))

    stand_in(
        monkeypatch,
        "mlflow",
        set_experiment=lambda name: calls.append(name),
        start_run=start_run,
        log_dict=lambda values, name: calls.append((name, values)),
        log_metrics=lambda metrics, step: calls.append((step, metrics)),
        end_run=lambda: calls.append("end"),
    )
    (tmp_path / "config.json").write_text('{"seed": 3}')
    for step in (1, 2):
        trackers = Trackers({"mlflow_experiment": "mine"}, tmp_path)
        trackers.log({"a": 1.0, "b": math.nan}, step)
        trackers.finish()
    assert starts == [{"run_name": tmp_path.name}, {"run_id": "abc"}]
    first = ["mine", ("config.json", {"seed": 3}), (1, {"a": 1.0}), "end"]
    assert calls == [*first, "mine", (2, {"a": 1.0}), "end"]


def test_trackio_continues_the_run_of_its_name(tmp_path, monkeypatch):
    inits, calls = [], []
    stand_in(
        monkeypatch,
        "trackio",
        init=lambda **arguments: inits.append(arguments),
        log=lambda metrics, step: calls.append((step, metrics)),
        finish=lambda: calls.append("end"),
    )
    trackers = Trackers({"trackio_project": "mine", "wandb_project": ""}, tmp_path)
    trackers.log(METRICS, 4)
    trackers.finish()
    expected = {"project": "mine", "name": tmp_path.name, "config": None, "resume": "allow"}
    assert inits == [expected] and calls == [(4, METRICS), "end"]


@pytest.mark.parametrize("broken", ["init", "log", "finish"])
def test_a_tracker_that_fails_ends_no_run_and_warns_once(broken, tmp_path, monkeypatch):
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route to https://user:secret@tracker")

    functions = {name: lambda *_, **__: None for name in ("init", "log", "finish")}
    stand_in(monkeypatch, "trackio", **(functions | {broken: fail}))
    with pytest.warns(UserWarning, match="run.trackio_project: trackio failed") as warnings:
        log = Log(tmp_path, 0, 2, {"trackio_project": "mine"})
        log.write(1, METRICS, None)
        log.write(2, METRICS, None)
        log.close()
    assert len(warnings) == 1 and "secret" not in str(warnings[0].message)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize("key", TRACKERS)
def test_a_tracker_works_without_a_network(key, tmp_path, monkeypatch):
    if importlib.util.find_spec(TRACKERS[key]) is None:
        pytest.skip(f"{TRACKERS[key]} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"seed": 3}')
    for step in (1, 2):
        trackers = Trackers({key: "mine"}, tmp_path)
        trackers.log(METRICS, step)
        assert trackers.running.keys() == {key}
        trackers.finish()
        assert trackers.running.keys() == {key}
