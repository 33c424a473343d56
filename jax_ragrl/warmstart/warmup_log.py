"""The log of a warm-up, which continues where a resumed warm-up does."""

from __future__ import annotations

import collections
import json
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jax_ragrl.learner.gradients import check_finite
from jax_ragrl.learner.imitation import PackedRows
from jax_ragrl.runtime.jsonl import append_row, drop_after_step


class WarmupLog:
    """One JSON line every `every` steps, printed and written to a file.

    A line has the step, the tokens and seconds up to it, and the means of the metrics of the last
    `every` steps.
    """

    def __init__(self, file: pathlib.Path, every: int, step: int, entries: Mapping[str, Any]):
        """Opens the log; lines of steps that are repeated are removed."""
        drop_after_step(file, step)
        self._file, self._every, self._step = file, every, step
        self._tokens = entries.get("tokens", 0)
        self._start = time.perf_counter() - entries.get("seconds", 0.0)
        # The dtype of the devices, in which the means are computed.
        recent = jax.tree.map(np.float32, entries.get("recent", []))
        self._recent: collections.deque[Any] = collections.deque(recent, maxlen=every)

    def add(self, batch: PackedRows, metrics: Any) -> None:
        """Adds one step."""
        self._step += 1
        self._tokens += int(np.sum(batch.segments_RL > 0))
        self._recent.append(metrics)

    def is_due(self) -> bool:
        """Whether the last step ends a line."""
        return self._step % self._every == 0

    def check(self) -> None:
        """Raises `UserError` if parameters are not finite; once they are not, they remain so."""
        if self._recent:
            check_finite({"not_finite": float(self._recent[-1]["not_finite"])})

    def entries(self) -> dict[str, Any]:
        """Returns the values from which a log continues; checks, since a checkpoint has them."""
        self.check()
        recent = jax.tree.map(float, jax.device_get(list(self._recent)))
        return {"tokens": self._tokens, "seconds": self._seconds(), "recent": recent}

    def write(self, exact: Mapping[str, float]) -> None:
        """Writes a line.

        Raises:
          UserError: parameters are not finite.
        """
        self.check()
        # Fetched here only: a fetch per step would let the devices wait for the host.
        recent = jax.device_get(list(self._recent))
        names = sorted(recent[0].keys() - {"skipped", "not_finite"})
        means = {k: round(float(np.mean([m[k] for m in recent])), 4) for k in names}
        means["skipped"] = float(sum(m["skipped"] for m in recent))
        line = {"step": self._step, "tokens": self._tokens, "seconds": self._seconds()}
        line |= {**means, "exact": exact}
        print(json.dumps(line), flush=True)
        append_row(self._file, line)

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._start, 1)
