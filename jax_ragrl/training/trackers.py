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
    """A run of an experiment tracker."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step; some may be nan."""

    def finish(self) -> None:
        """Ends the run."""


class WandB:
    """A run of Weights & Biases."""

    def __init__(self, project: str, workdir: pathlib.Path):
        """Opens or continues the run of a work folder."""
        self._run = importlib.import_module("wandb").init(
            project=project,
            name=workdir.name,
            # The id derives from the folder, so that a resumed run finds its first part again.
            id=hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()[:16],
            resume="allow",
            dir=workdir,
            config=saved_config(workdir),
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Ends the run."""
        self._run.finish()


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
        """Records the metrics of a step."""
        # Some stores of MLflow refuse nan.
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._mlflow.log_metrics(finite, step=step)

    def finish(self) -> None:
        """Ends the run."""
        self._mlflow.end_run()


class Trackio:
    """A run of Trackio, which keeps its data on this machine."""

    def __init__(self, project: str, workdir: pathlib.Path):
        """Opens or continues the run of a work folder."""
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(
            project=project, name=workdir.name, config=saved_config(workdir), resume="allow"
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Records the metrics of a step."""
        self._trackio.log(dict(metrics), step=step)

    def finish(self) -> None:
        """Ends the run."""
        self._trackio.finish()


OPEN: Mapping[str, Callable[[str, pathlib.Path], Tracker]] = {
    "wandb_project": WandB,
    "mlflow_experiment": MLflow,
    "trackio_project": Trackio,
}


class Trackers:
    """All trackers of a run. One that fails is dropped with a warning."""

    def __init__(self, projects: Mapping[str, str], workdir: pathlib.Path):
        """Opens the trackers.

        Args:
          projects: by keys of `run.config.TRACKERS`, names of projects; an empty name opens none.
          workdir: the folder of the run.
        """
        self._open = dict[str, Tracker]()
        for key, project in projects.items():
            if project:
                self._try(key, functools.partial(self._add, key, project, workdir))

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of the trackers that have not failed."""
        return tuple(self._open)

    def _add(self, key: str, project: str, workdir: pathlib.Path) -> None:
        self._open[key] = OPEN[key](project, workdir)

    def _try(self, key: str, call: Callable[[], None]) -> None:
        # Trackers raise their own classes of errors, and errors of the network and of files.
        try:
            call()
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
            self._try(key, functools.partial(tracker.log, metrics, step))

    def finish(self) -> None:
        """Ends the runs of all trackers."""
        for key, tracker in list(self._open.items()):
            self._try(key, tracker.finish)


def saved_config(workdir: pathlib.Path) -> dict[str, Any] | None:
    """Returns the saved config of a run, which has no credentials; None without one."""
    file = workdir / "config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
