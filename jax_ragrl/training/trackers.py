"""Experiment trackers that also receive the metrics of a run: Weights & Biases, MLflow, Trackio.

A tracker is a convenience: its failure never ends a run. Each one continues its own run if the work
folder is resumed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import math
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jax_ragrl.errors import redacted
from jax_ragrl.run.config import TRACKERS
from jax_ragrl.runtime.caches import write_text

MLFLOW_RUN = "mlflow_run"  # the file with the id of the run of MLflow
# Functions that record the metrics of a step, some of which may be nan, and that end the run.
Tracker = tuple[Callable[..., Any], Callable[[], Any]]


def open_tracker(key: str, project: str, workdir: pathlib.Path) -> Tracker:
    """Opens or continues the run of a work folder in a project; `key` is one of `TRACKERS`."""
    package: Any = importlib.import_module(TRACKERS[key])
    file = workdir / "config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if key == "mlflow_experiment":
        return _open_mlflow(package, project, workdir, config)
    settings: dict[str, Any] = {"project": project, "name": workdir.name, "resume": "allow"}
    settings["config"] = config
    if key == "wandb_project":
        # The id derives from the folder, so that a resumed run finds its first part again.
        settings["id"] = hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()[:16]
        settings["dir"] = workdir
    run = package.init(**settings)
    # Trackio, which keeps its data on this machine, logs by functions of the package.
    run = run if key == "wandb_project" else package
    return run.log, run.finish


def _open_mlflow(mlflow: Any, experiment: str, workdir: pathlib.Path, config: Any) -> Tracker:
    mlflow.set_experiment(experiment)
    file = workdir / MLFLOW_RUN
    if file.is_file():
        mlflow.start_run(run_id=file.read_text(encoding="utf-8"))
    else:
        run = mlflow.start_run(run_name=workdir.name)
        write_text(file, run.info.run_id)
        # Parameters are short texts in MLflow; a file keeps the nested config.
        mlflow.log_dict(config or {}, "config.json")

    def log(metrics: Mapping[str, float], step: int) -> None:
        # Some stores of MLflow refuse nan.
        mlflow.log_metrics({k: x for k, x in metrics.items() if math.isfinite(x)}, step=step)

    return log, mlflow.end_run


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning."""

    def __init__(self, projects: Mapping[str, str], workdir: pathlib.Path):
        """Opens trackers of projects by keys of `TRACKERS`; an empty name opens none."""
        self.running = dict[str, Tracker]()
        for key in filter(projects.get, projects):
            tracker = self._try(key, functools.partial(open_tracker, key, projects[key], workdir))
            self.running |= {key: tracker} if tracker else {}

    def _try(self, key: str, call: Callable[[], Any]) -> Any:
        # Trackers raise their own classes of errors, and errors of the network and of files.
        try:
            return call()
        except Exception as error:
            self.running.pop(key, None)
            warnings.warn(
                f"run.{key}: {TRACKERS[key]} failed, so it gets no more metrics "
                f"({type(error).__name__}: {redacted(str(error))}); metrics.jsonl has all of them",
                stacklevel=3,
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for key, (log, _) in list(self.running.items()):
            self._try(key, functools.partial(log, dict(metrics), step=step))

    def finish(self) -> None:
        for key, (_, finish) in list(self.running.items()):
            self._try(key, finish)
