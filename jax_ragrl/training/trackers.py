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
from typing import Any, Protocol

from jax_ragrl.errors import redacted
from jax_ragrl.run.config import TRACKERS

MLFLOW_RUN = "mlflow_run"  # the file with the id of the run of MLflow


class Tracker(Protocol):
    """A run of an experiment tracker, such as those of Weights & Biases."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step; some may be nan."""

    def finish(self) -> None:
        """Ends the run."""


class MLflow:
    """A run of MLflow at the server or folder that `MLFLOW_TRACKING_URI` names."""

    def __init__(self, experiment: str, workdir: pathlib.Path):
        """Opens or continues the run of a work folder."""
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        file = workdir / MLFLOW_RUN
        if file.is_file():
            self._mlflow.start_run(run_id=file.read_text(encoding="utf-8"))
        else:
            run = self._mlflow.start_run(run_name=workdir.name)
            file.write_text(run.info.run_id, encoding="utf-8")
            # Parameters are short texts in MLflow; a file keeps the nested config.
            self._mlflow.log_dict(saved_config(workdir) or {}, "config.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step, without nan, which some stores of MLflow refuse."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=step)

    def finish(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()


def open_tracker(key: str, project: str, workdir: pathlib.Path) -> Tracker:
    """Opens or continues the run of a work folder.

    Args:
      key: one of `run.config.TRACKERS`.
      project: the name of the project.
      workdir: the folder of the run.
    """
    if key == "mlflow_experiment":
        return MLflow(project, workdir)
    package: Any = importlib.import_module(TRACKERS[key])
    settings: dict[str, Any] = {"project": project, "name": workdir.name, "resume": "allow"}
    settings["config"] = saved_config(workdir)
    if key == "wandb_project":
        # The id derives from the folder, so that a resumed run finds its first part again.
        settings["id"] = hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()[:16]
        settings["dir"] = workdir
    run: Any = package.init(**settings)
    # Trackio, which keeps its data on this machine, logs by functions of the package.
    return run if key == "wandb_project" else package


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning."""

    def __init__(self, projects: Mapping[str, str], workdir: pathlib.Path):
        """Opens the trackers.

        Args:
          projects: by keys of `run.config.TRACKERS`, names of projects; an empty name opens none.
          workdir: the folder of the run.
        """
        self._open = dict[str, Tracker]()
        for key in filter(projects.get, projects):
            tracker = self._try(key, functools.partial(open_tracker, key, projects[key], workdir))
            self._open |= {key: tracker} if tracker else {}

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the trackers that have not failed."""
        return tuple(self._open)

    def _try(self, key: str, call: Callable[[], Any]) -> Any:
        # Trackers raise their own classes of errors, and errors of the network and of files.
        try:
            return call()
        except Exception as error:
            self._open.pop(key, None)
            warnings.warn(
                f"run.{key}: {TRACKERS[key]} failed, so it gets no more metrics "
                f"({type(error).__name__}: {redacted(str(error))}); metrics.jsonl has all of them",
                stacklevel=3,
            )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step in all trackers."""
        for key, tracker in list(self._open.items()):
            self._try(key, functools.partial(tracker.log, dict(metrics), step))

    def finish(self) -> None:
        """Ends the runs of all trackers."""
        for key, tracker in list(self._open.items()):
            self._try(key, tracker.finish)


def saved_config(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Returns the saved config of a run, which has no credentials; None without one."""
    file = workdir / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
