"""Every system on the embedded default: one job a system and seed, and the table of what they won.

A trial is a `quickstart` job in a folder of its own, so a killed run of trials goes on where it
stood; a finished trial is read, not repeated. A system with a warm-up of its own starts from it.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from jax_ragrl.quickstart import quickstart
from jax_ragrl.train.job import Job

COLUMNS = ("system", "seed", "warm start F1", "trained F1", "gain", "95 %", "wall s")


def run_trials(
    systems: Sequence[str],
    seeds: Sequence[int],
    load: Callable[[str, int, str, pathlib.Path], Job],
    warm: Callable[[str, pathlib.Path], Any],
    out: pathlib.Path,
) -> str:
    """The table of all trials, in Markdown; it is rewritten to `out/trials.md` after each.

    Args:
      systems: names of tiny configs.
      seeds: of world and training.
      load: the job of a system and a seed, from a policy (empty: its config's), in its folder.
      warm: runs the warm-up of a system in a folder, where it has one (else it returns None).
      out: holds one folder a trial, and one a warm-up.
    """
    rows = []
    for system in systems:
        policy = warm_start(system, warm, out / f"{system}-warm")
        for seed in seeds:
            workdir = out / f"{system}-{seed}"
            done = workdir / "summary.json"
            job = load(system, seed, policy, workdir)
            finished = done.is_file()
            summary = json.loads(done.read_text()) if finished else quickstart(job, workdir)
            rows.append(row(system, summary))
            (out / "trials.md").write_text(markdown(rows), encoding="utf-8")
    return markdown(rows)


def warm_start(system: str, warm: Callable[[str, pathlib.Path], Any], folder: pathlib.Path) -> str:
    """The folder of a system's warm start, made unless it is there; empty where it has none."""
    done = folder / "done.json"
    if not done.is_file():
        curve = warm(system, folder)
        if curve is None:
            return ""
        done.write_text(json.dumps(curve) + "\n", encoding="utf-8")
    return str(folder / "checkpoint")


def row(system: str, summary: dict[str, Any]) -> tuple[Any, ...]:
    """One line of the table: F1 in percent on held-out questions, before and after training."""
    gain = summary["gains"]["f1"]
    low, high = gain["ci95"]
    warm = round(gain["trained"] - gain["mean"], 2)
    won = (warm, gain["trained"], gain["mean"], f"{low} to {high}")
    return system, summary["seed"], *won, summary["wall_s"]


def markdown(rows: Sequence[tuple[Any, ...]]) -> str:
    """Rows under `COLUMNS` as a Markdown table."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
