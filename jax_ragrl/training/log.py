"""Logging of a run: metrics to a file, TensorBoard, trackers and the terminal."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from jax_ragrl.runtime.compile_cache import compile_seconds, compiled_programs
from jax_ragrl.runtime.jsonl import append_row, drop_after_step, read_rows
from jax_ragrl.runtime.multihost import is_process_zero, on_process_zero
from jax_ragrl.runtime.progress import progress
from jax_ragrl.training.trackers import Trackers

# Where torch is installed, tensorboardX imports it, for seconds, and for nothing that is used here.
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
import tensorboardX  # noqa: E402

if sys.modules["torch"] is None:
    del sys.modules["torch"]

METRICS, TREES = "metrics.jsonl", "trees.jsonl"
FIRST_STEPS = 5  # of a process: the programs of most of its shapes compile within them


class Clock:
    """Measures the wall time of laps in seconds, and the compilation time within all of them."""

    def __init__(self) -> None:
        self._last, self._compiled = time.perf_counter(), compile_seconds()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now
        self.laps["time/compile_s"] = round(compile_seconds() - self._compiled, 1)


class ProgramCounter:
    """Counts the programs that a process compiles or loads from a cache, by the steps of a run.

    A program is unexpected if it compiles after `FIRST_STEPS` steps of the process and after a
    first evaluation, which has its own programs.
    """

    def __init__(self) -> None:
        self._count, self._steps, self._is_evaluated = compiled_programs(), 0, False

    def metrics(self, *, has_evaluation: bool) -> dict[str, float]:
        """Returns the programs since the last call, and those that are unexpected."""
        before, self._count, self._steps = self._count, compiled_programs(), self._steps + 1
        is_first = self._steps <= FIRST_STEPS or (has_evaluation and not self._is_evaluated)
        self._is_evaluated |= has_evaluation
        programs = float(self._count - before)
        return {"compile/programs": programs, "compile/unexpected": 0.0 if is_first else programs}


class Log:
    """Writes the metrics of each step: a line, a JSON row, TensorBoard, and trackers if named.

    Only the first process writes. A killed run may have written steps and trees after its last
    checkpoint. They are removed first, so that the files of a resumed run hold each step once.
    """

    # A name that ends with "/" stands for all metrics that begin with it, see `matching_keys`.
    DISPLAY = (
        *("reward/mean", "reward/own", "kl/mean", "clip_frac", "entropy"),
        *("response_length/mean", "valid_frac/"),
        *("retrieval/recall", "tokens_per_sec", "mfu", "eval/accuracy"),
        *("time/rollout_s", "time/train_s"),
    )
    # Displayed only if not 0.
    ALARMS = (
        *("failed", "skipped", "guard/rate_factor", "time/compile_s", "compile/unexpected"),
        "version_changes",
    )

    def __init__(
        self,
        workdir: pathlib.Path,
        start: int,
        steps: int,
        projects: Mapping[str, str] = MappingProxyType({}),
    ):
        """Opens the log of a run of `steps`, of which `start` are completed; see `Trackers`."""
        self._stack = contextlib.ExitStack()
        self._writes = is_process_zero()
        if not self._writes:
            return
        self._metrics, self._trees = workdir / METRICS, workdir / TREES
        for file in (self._metrics, self._trees):
            # A run that begins also writes step 0 again.
            drop_after_step(file, start or -1)
        # `purge_step` hides the steps of a killed run after its checkpoint.
        board = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=start + 1 if start else None
        )
        self._board = self._stack.enter_context(contextlib.closing(board))
        self._trackers = Trackers(projects, workdir)
        self._stack.callback(self._trackers.finish)
        self._bar = self._stack.enter_context(progress("train", "step", steps, initial=start))
        if start < steps:
            self.say(f"step {start + 1} compiles its programs first: it may take minutes")

    def write(
        self, step: int, metrics: dict[str, float], trees: list[dict[str, Any]] | None
    ) -> dict[str, Any]:
        """Writes a step, the number of completed ones, to all outputs; returns its row.

        `trees` are those for the report (`rollout.trace.trees`); None: the step has none.
        """
        row = metrics_row(step, metrics)
        if not self._writes:
            return row
        append_row(self._metrics, row)
        if trees is not None:
            append_row(self._trees, {"step": step, "trees": trees})
        # TensorBoard accepts nan; the JSON row replaces it by null.
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._trackers.log(metrics, step)
        alarms = [key for key in matching_keys(metrics, self.ALARMS) if metrics[key]]
        keys = [*matching_keys(metrics, self.DISPLAY), *alarms]
        line = " ".join(f"{key} {format_number(metrics[key])}" for key in keys)
        self.say(f"step {step} {line}")
        self._bar.update(step - self._bar.done)  # none for the evaluation before training, step 0
        return row

    def say(self, text: str) -> None:
        if self._writes:
            tqdm.write(text)

    def close(self) -> None:
        self._stack.close()


def metrics_row(step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Returns the row of `metrics.jsonl` of a step, the number of completed steps.

    Decisions about a run (`early_stop`, `warden`) read rows, not metrics: a resumed run has the
    rows of the file only, and has to decide as the run before did.
    """
    return {"step": step, **{k: round(float(v), 6) for k, v in sorted(metrics.items())}}


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the rows of `metrics.jsonl` of a run, equal on all processes; a collective."""
    return on_process_zero(lambda: list(read_rows(workdir / METRICS)))


def matching_keys(metrics: Mapping[str, float], names: Sequence[str]) -> list[str]:
    """Returns the metric keys that match `names`, in the order of the names.

    A name that ends with "/" matches all keys that begin with it. A name also matches the keys of
    each policy: `kl/mean` matches `plan/kl/mean`.
    """
    # The leading slashes keep `valid_frac/` from matching `invalid_frac/`.
    return [
        key
        for name in names
        for key in sorted(metrics)
        if (f"/{name}" in f"/{key}" if name.endswith("/") else f"/{key}".endswith(f"/{name}"))
    ]


def format_number(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
