"""Every system on the embedded default: one job a system and seed, and the table of what they won.

A trial is a `quickstart` job in a folder of its own, so a killed run of trials goes on where it
stood; a finished trial is read, not repeated. A system with a warm-up of its own starts from it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.errors import UserError
from jax_ragrl.experiments.experiment import gain, quickstart
from jax_ragrl.run.components import load_data
from jax_ragrl.run.config import Job

COLUMNS = ("system", "seed", "warm start F1", "trained F1", "gain", "95 %", "wall s")


def run_trials(
    systems: Sequence[str],
    seeds: Sequence[int],
    load: Callable[[str, int, str, pathlib.Path], Job],
    warm: Mapping[str, Callable[[pathlib.Path], Any]],
    out: pathlib.Path,
    against: pathlib.Path | None = None,
) -> str:
    """The table of all trials, in Markdown; it is rewritten to `out/trials.md` after each.

    Args:
      systems: names of tiny configs.
      seeds: of world and training.
      load: the job of a system and a seed, from a policy (empty: its config's), in its folder.
      warm: the systems that begin with a warm-up, each with what runs it in a folder.
      out: holds one folder a trial, and one a warm-up.
      against: the `out` of finished trials of the same systems and seeds. A last column says what
        each trial won over the one of its name there, on the same questions.

    Raises `UserError`, before anything is trained, where a job cannot be loaded, or not compared.
    """
    start = {system: out / f"{system}-warm" / "checkpoint" for system in warm}
    trials = [(system, out / f"{system}-{seed}", seed) for system in systems for seed in seeds]
    jobs = [load(z, seed, str(start.get(z, "")), folder) for z, folder, seed in trials]
    if against is not None:
        check_pairs([folder for _, folder, _ in trials], jobs, against)
    columns, rows = COLUMNS + ((f"over {against}",) if against else ()), []
    for (system, folder, _), job in zip(trials, jobs, strict=True):
        if system in warm:
            warm_up_once(warm[system], start[system].parent)
        done = folder / "summary.json"
        summary = json.loads(done.read_text()) if done.is_file() else quickstart(job, folder)
        over = (lead(folder, against / folder.name),) if against else ()
        rows.append(row(system, summary) + over)
        (out / "trials.md").write_text(markdown(columns, rows), encoding="utf-8")
    return markdown(columns, rows)


def warm_up_once(run: Callable[[pathlib.Path], Any], folder: pathlib.Path) -> None:
    """Makes a system's warm start in a folder, unless it is there."""
    done = folder / "done.json"
    if not done.is_file():
        curve = run(folder)
        done.write_text(json.dumps(curve) + "\n", encoding="utf-8")


def check_pairs(
    folders: Sequence[pathlib.Path], jobs: Sequence[Job], against: pathlib.Path
) -> None:
    """Raises `UserError` where a trial has no counterpart that was asked the same questions."""
    for folder, job in zip(folders, jobs, strict=True):
        other, asked = against / folder.name, held_out(job)
        finished = [folder] if (folder / "summary.json").is_file() else []
        for kept in (other, *finished):
            if trained(kept)["asked"] != asked:
                raise UserError(
                    f"{kept} was asked other held-out questions than {folder} is to be: give both "
                    "the same data, and the same run.test_questions"
                )


def held_out(job: Job) -> str:
    """The fingerprint of the questions that a job ends with."""
    files = job.data.files and dataclasses.replace(job.data.files, corpus="")  # which is not read
    questions = load_data(dataclasses.replace(job.data, files=files)).questions["test"]
    return fingerprint(questions[: job.run.test_questions])


def trained(folder: pathlib.Path) -> dict[str, Any]:
    """What a finished trial has kept of its trained policy: every score of every question."""
    if not (folder / "summary.json").is_file():
        raise UserError(
            f"{folder} holds no finished trial to compare with: run 'ragrl trials --out "
            f"{folder.parent}' with the same systems and seeds first"
        )
    if not (file := folder / "trained.json").is_file():
        raise UserError(
            f"{folder} is of a version that kept no scores: delete its summary.json and give its "
            "'ragrl trials' again, which trains nothing anew"
        )
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def lead(folder: pathlib.Path, other: pathlib.Path) -> str:
    """By how many points of F1 a trial is ahead of another, and the paired 95 % interval."""
    won = gain(*(trained(x)["scores"]["f1"] for x in (other, folder)))
    low, high = won["ci95"]
    return f"{won['mean']}, {low} to {high}"


def row(system: str, summary: dict[str, Any]) -> tuple[Any, ...]:
    """One line of the table: F1 in percent on held-out questions, before and after training. It is
    None where no question was answered both times."""
    f1 = summary["gains"]["f1"]
    low, high = f1["ci95"]
    warm = None if f1["mean"] is None else round(f1["trained"] - f1["mean"], 2)
    won = (warm, f1["trained"], f1["mean"], f"{low} to {high}")
    return system, summary["seed"], *won, summary["wall_s"]


def markdown(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """Rows under columns as a Markdown table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
