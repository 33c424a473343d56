"""What a training step was like, and where that is written: files, TensorBoard, the terminal."""

from __future__ import annotations

import collections
import json
import pathlib
import time
from typing import Any

import numpy as np
import tensorboardX
from tqdm import tqdm

from jax_ragrl.rollout.tree import Forest


def describe(forest: Forest, credit_N: np.ndarray) -> dict[str, float]:
    """What a rollout was like: rewards, malformed shares by role, size."""
    leaves = np.flatnonzero(forest.leaf_N)
    metrics = {
        "reward/mean": float(forest.reward_N[leaves].mean()) if len(leaves) else 0.0,
        "nodes": float(len(forest.records) - len(leaves)),
        "leaves": float(len(leaves)),
        "failed": float(len(forest.failed)),
        "retrieval/recall": found_gold(forest),
    }
    fatal = {int(forest.parent_N[i]) for i in leaves if forest.records[i].fault}
    for role in sorted({r.role for r in forest.records if r.action is not None}):
        nodes = [i for i, r in enumerate(forest.records) if r.role == role]
        faults = [i in fatal or forest.records[i].fault != "" for i in nodes]
        metrics[f"valid_frac/{role}"] = 1 - sum(faults) / len(nodes)
        metrics[f"credit/{role}"] = float(credit_N[nodes].mean())
    return metrics | counts(forest) | strategy_rewards(forest)


def counts(forest: Forest) -> dict[str, float]:
    """How often what went wrong, as `dead/<why>` and `malformed/<error>`."""
    whys = [f"dead/{forest.records[i].why}" for i in np.flatnonzero(forest.dead_N)]
    whys += [
        f"malformed/{r.fault}" for r in forest.records if r.action is not None and r.fault != ""
    ]
    return {name: float(count) for name, count in collections.Counter(whys).items()}


def strategy_rewards(forest: Forest) -> dict[str, float]:
    """The mean reward of the leaves of each strategy, where a system has strategies."""
    rewards: dict[str, list[float]] = {}
    for i in np.flatnonzero(forest.leaf_N):
        strategy = getattr(forest.records[i].state, "strategy", "")
        if strategy:
            rewards.setdefault(f"reward/{strategy}", []).append(float(forest.reward_N[i]))
    return {name: float(np.mean(values)) for name, values in rewards.items()}


def found_gold(forest: Forest) -> float:
    """The mean share of a question's gold passages that some search of its rollouts returned."""
    found: dict[int, set[str]] = {}
    for i in np.flatnonzero(forest.leaf_N):
        record = forest.records[i]
        ids = {passage.id for call in record.calls for passage in call.found}
        found.setdefault(record.question, set()).update(ids)
    shares = [
        len(found.get(i, set()).intersection(question.gold)) / len(question.gold)
        for i, question in enumerate(forest.questions)
        if question.gold and i not in forest.failed
    ]
    return float(np.mean(shares)) if shares else 0.0


class Clock:
    """Wall time between laps, in seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Ends a lap."""
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


class Log:
    """Metrics of each step: one line, a JSON row, TensorBoard; trees for the report.

    What a killed run wrote after its last checkpoint is dropped first, so a resumed run's files
    hold each step once.
    """

    SHOWN = ("reward/mean", "kl/mean", "entropy", "clip_frac", "eval/accuracy")

    def __init__(self, workdir: pathlib.Path, start: int, steps: int):
        self._metrics, self._trees = workdir / "metrics.jsonl", workdir / "trees.jsonl"
        for file in (self._metrics, self._trees):
            _keep_until(file, start)
        self._board = tensorboardX.SummaryWriter(
            str(workdir / "tensorboard"), purge_step=start + 1 if start else None
        )
        self._bar = tqdm(total=steps, initial=start, desc="train", unit="step")

    def write(
        self, step: int, metrics: dict[str, float], trees: list[dict[str, Any]] | None
    ) -> None:
        """Writes one step everywhere."""
        row = {"step": step, **{k: round(float(v), 6) for k, v in sorted(metrics.items())}}
        _append(self._metrics, row)
        if trees is not None:
            _append(self._trees, {"step": step, "trees": trees})
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        shown = " ".join(f"{k} {metrics[k]:.3f}" for k in self.SHOWN if k in metrics)
        seconds = metrics["time/rollout_s"] + metrics["time/train_s"]
        self._bar.write(f"step {step} {shown} {seconds:.1f}s")
        self._bar.update()

    def close(self) -> None:
        """Closes the files."""
        self._bar.close()
        self._board.close()


def _append(file: pathlib.Path, row: dict[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def _keep_until(file: pathlib.Path, step: int) -> None:
    """Drops rows after `step`, a torn last line among them."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        kept += [line] if row["step"] <= step else []
    file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
