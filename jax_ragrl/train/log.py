"""Writers of metrics: files, TensorBoard, Weights & Biases, the terminal."""

from __future__ import annotations

import hashlib
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import tensorboardX
from tqdm import tqdm

from jax_ragrl.runtime.compile_cache import compile_seconds
from jax_ragrl.runtime.jsonl import append, keep_until
from jax_ragrl.runtime.multihost import first


class Clock:
    """Wall time between laps, in seconds; and what of all of it went into compiling."""

    def __init__(self) -> None:
        self._last, self._compiled = time.perf_counter(), compile_seconds()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends a lap."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now
        self.laps["time/compile_s"] = round(compile_seconds() - self._compiled, 1)


class Log:
    """Metrics of each step: one line, a JSON row, TensorBoard, a project of Weights & Biases if one
    is named; trees for the report.

    What a killed run wrote after its last checkpoint is dropped first, so a resumed run's files
    hold each step once.
    """

    SHOWN = (
        *("reward/mean", "kl/mean", "clip_frac", "entropy", "response_length/mean", "valid_frac/"),
        *("retrieval/recall", "tokens_per_sec", "mfu", "eval/accuracy"),
        *("time/rollout_s", "time/train_s"),
    )
    ALARMS = ("failed", "skipped", "time/compile_s")  # shown where they are not 0

    def __init__(self, workdir: pathlib.Path, start: int, steps: int, wandb: str = ""):
        self._metrics, self._trees = workdir / "metrics.jsonl", workdir / "trees.jsonl"
        for file in (self._metrics, self._trees):
            keep_until(file, start)
        self._board = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=start + 1 if start else None
        )
        self._wandb = open_wandb(wandb, workdir) if wandb else None
        self._bar = tqdm(total=steps, initial=start, desc="train", unit="step")
        if start < steps:
            self._bar.write(f"step {start + 1} compiles its programs first: it may take minutes")

    def write(
        self, step: int, metrics: dict[str, float], trees: list[dict[str, Any]] | None
    ) -> None:
        """Writes one step everywhere."""
        row = {"step": step, **{k: round(float(v), 6) for k, v in sorted(metrics.items())}}
        append(self._metrics, row)
        if trees is not None:
            append(self._trees, {"step": step, "trees": trees})
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)
        alarms = [key for key in told(metrics, self.ALARMS) if metrics[key]]
        shown = [f"{k} {number(metrics[k])}" for k in [*told(metrics, self.SHOWN), *alarms]]
        self._bar.write(f"step {step} {' '.join(shown)}")
        self._bar.update()

    def close(self) -> None:
        """Closes the files."""
        self._bar.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


def open_wandb(project: str, workdir: pathlib.Path) -> Any:
    """A run of Weights & Biases, the same one for a work folder however often it is begun."""
    import wandb

    config = workdir / "config.json"
    return wandb.init(
        project=project,
        name=workdir.name,
        id=hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()[:16],
        resume="allow",
        dir=workdir,
        config=json.loads(config.read_text(encoding="utf-8")) if config.exists() else None,
    )


def told(metrics: Mapping[str, float], names: Sequence[str]) -> list[str]:
    """The keys of these metrics, of all that begin with a name that ends in a slash; where there
    are several policies, of each policy's."""
    return [key for name in names for key in sorted(metrics) if _named(key, name)]


def _named(key: str, name: str) -> bool:
    at = f"/{key}".find(f"/{name}")
    return at >= 0 and (name.endswith("/") or f"/{key}".endswith(f"/{name}"))


def number(value: float) -> str:
    """Three digits behind the point; none where there are three before it."""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"


class Silent:
    """The log of a process that is not the first: nothing."""

    def write(self, *_: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def open_log(workdir: pathlib.Path, start: int, steps: int, wandb: str) -> Log | Silent:
    """The log of a run from the step `start`; of several processes the first one writes it."""
    return Log(workdir, start, steps, wandb) if first() else Silent()
