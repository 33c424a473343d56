"""Multi-seed experiments: one trial per system and seed, and a table of the gains.

A trial is a `quickstart` experiment in its own folder, so an interrupted call resumes, and finished
trials are read instead of repeated. A system that has a warm-up starts from it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.errors import UserError
from jax_ragrl.experiments.experiment import paired_gain, quickstart
from jax_ragrl.experiments.pooled import COLUMNS as COLUMNS_OVER_SEEDS
from jax_ragrl.experiments.pooled import pooled_rows
from jax_ragrl.experiments.warm_folder import WarmFolder
from jax_ragrl.run.config import Job
from jax_ragrl.run.data import load_data
from jax_ragrl.warmstart.warmup import LOG

COLUMNS = (
    "system",
    "seed",
    "Standard RAG F1",
    "warm start F1",
    "trained F1",
    "gain",
    "95 %",
    "wall s",
)
DONE = "done.json"  # of a warm-up that is complete


class WarmUp(NamedTuple):
    """The warm-up of a system.

    Fields:
      run: runs it in a folder, or resumes it there; returns a summary as JSON values.
      settings: its config.
    """

    run: Callable[[pathlib.Path], Any]
    settings: Mapping[str, Any]


def run_trials(
    systems: Sequence[str],
    seeds: Sequence[int],
    load: Callable[[str, int, str, pathlib.Path], Job],
    warm: Mapping[str, WarmUp],
    out: pathlib.Path,
    baseline: pathlib.Path | None = None,
) -> str:
    """Runs one trial per system and seed; rewrites `out/trials.md` after each.

    Args:
      systems: names of tiny configs.
      seeds: random seeds of data and training.
      load: gives the job of a system, a seed, a policy (empty: that of the config) and a folder.
      warm: the warm-ups of the systems that have one.
      out: holds one folder per trial and one per warm-up.
      baseline: the `out` of finished trials of the same systems and seeds. Adds a column with the
        gain of each trial over the baseline's trial of the same name, on the same questions.

    Returns:
      The table of all trials in Markdown, and a table over the seeds of each system.

    Raises:
      UserError: a job is invalid or cannot be compared with the baseline, or `out` holds a trial or
        a warm-up of another config. No training has started.
    """
    warm_folders = {z: _warm_folder(warm_up, out / f"{z}-warm") for z, warm_up in warm.items()}
    checkpoints = {z: place.folder / "checkpoint" for z, place in warm_folders.items()}
    trials = [(system, out / f"{system}-{seed}", seed) for system in systems for seed in seeds]
    # All jobs are loaded before the first one runs, so that a mistake costs no training time.
    jobs = [load(z, seed, str(checkpoints.get(z, "")), folder) for z, folder, seed in trials]
    if baseline is not None:
        check_baseline([folder for _, folder, _ in trials], jobs, baseline)
    for place in warm_folders.values():
        place.check()
    columns, rows, page = COLUMNS + ((f"over {baseline}",) if baseline else ()), [], ""
    for (system, folder, _), job in zip(trials, jobs, strict=True):
        if system in warm:
            ensure_warm_up(warm[system].run, warm_folders[system])
        file = folder / "summary.json"
        # `quickstart` writes the summary after the scores, so that it marks a finished trial.
        summary = json.loads(file.read_text()) if file.is_file() else quickstart(job, folder)
        difference = (compare_trials(folder, baseline / folder.name),) if baseline else ()
        rows.append(trial_row(system, summary, standard_rag_f1(folder)) + difference)
        # After each trial: an interrupted experiment leaves the rows that are complete.
        done = [(z, folder) for z, folder, _ in trials[: len(rows)]]
        page = markdown(columns, rows) + over_seeds(done, baseline)
        (out / "trials.md").write_text(page, encoding="utf-8")
    return page


def over_seeds(
    trials: Sequence[tuple[str, pathlib.Path]], baseline: pathlib.Path | None = None
) -> str:
    """The table over the seeds of each system in Markdown; empty if no trial kept its scores.

    Args:
      trials: the system and the folder of each finished trial.
      baseline: the folder of other trials to compare with.
    """
    rows = [
        row
        for system in dict.fromkeys(system for system, _ in trials)
        for row in pooled_rows(system, [f for s, f in trials if s == system], baseline)
    ]
    columns = COLUMNS_OVER_SEEDS + ((f"over {baseline}",) if baseline else ())
    return f"\n{markdown(columns, rows)}" if rows else ""


def _warm_folder(warm_up: WarmUp, folder: pathlib.Path) -> WarmFolder:
    results = (folder / LOG, folder / DONE)
    return WarmFolder(folder, warm_up.settings, results)


def ensure_warm_up(run: Callable[[pathlib.Path], Any], place: WarmFolder) -> None:
    """Runs a system's warm-up in a folder, unless the folder holds a finished one.

    Args:
      run: runs the warm-up, or resumes it; returns a summary as JSON values.
      place: the folder and the settings of the warm-up.

    Raises:
      UserError: the folder holds results of other settings.
    """
    place.claim()
    file = place.folder / DONE
    if not file.is_file():
        curve = run(place.folder)
        # Written last, so that its presence proves that the warm-up is complete.
        file.write_text(json.dumps(curve) + "\n", encoding="utf-8")


def check_baseline(
    folders: Sequence[pathlib.Path], jobs: Sequence[Job], baseline: pathlib.Path
) -> None:
    """Checks that each trial has a finished counterpart with the same held-out questions.

    Args:
      folders: folders of the trials.
      jobs: jobs of the trials, in the same order.
      baseline: folder of the other trials.

    Raises:
      UserError: a counterpart is missing or has other questions.
    """
    for folder, job in zip(folders, jobs, strict=True):
        questions_id = held_out_fingerprint(job)
        # A trial of an earlier call may have used other questions than this one.
        own = [folder] if (folder / "summary.json").is_file() else []
        for trial in (baseline / folder.name, *own):
            if load_trained_scores(trial)["asked"] != questions_id:
                raise UserError(
                    f"{trial} has other held-out questions than {folder}: give both the same data "
                    "and the same run.test_questions"
                )


def held_out_fingerprint(job: Job) -> str:
    """The fingerprint of a job's held-out questions."""
    # Without the corpus, whose passages can be large and do not affect the questions.
    files = job.data.files and dataclasses.replace(job.data.files, corpus="")
    questions = load_data(dataclasses.replace(job.data, files=files)).questions["test"]
    return fingerprint(questions[: job.run.test_questions])


def load_trained_scores(folder: pathlib.Path) -> dict[str, Any]:
    """The `trained.json` of a finished trial: scores of its trained policy per question."""
    if not (folder / "summary.json").is_file():
        raise UserError(
            f"{folder} holds no finished trial to compare with: run 'ragrl experiment trials --out "
            f"{folder.parent}' with the same systems and seeds first"
        )
    if not (file := folder / "trained.json").is_file():
        raise UserError(
            f"{folder} was written by a version that stored no scores: delete its summary.json and "
            "repeat its 'ragrl experiment trials', which evaluates without training again"
        )
    row: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return row


def compare_trials(folder: pathlib.Path, other: pathlib.Path) -> str:
    """The mean difference in F1 of two trials, in points, and its paired 95 % interval."""
    other_f1, own_f1 = (load_trained_scores(x)["scores"]["f1"] for x in (other, folder))
    difference = paired_gain(other_f1, own_f1)
    low, high = difference["ci95"]
    return f"{difference['mean']}, {low} to {high}"


def standard_rag_f1(folder: pathlib.Path) -> float | str:
    """F1 in percent of Standard RAG on the held-out questions of a trial; empty if not measured."""
    if not (file := folder / "baselines.json").is_file():
        return ""
    row = json.loads(file.read_text(encoding="utf-8")).get("standard_rag", {})
    return round(row["f1"], 2) if "f1" in row else ""


def trial_row(system: str, summary: dict[str, Any], standard_rag: float | str) -> tuple[Any, ...]:
    """One row of the table: F1 in percent on held-out questions, before and after training.

    Without a question that was answered both times, scores are missing (None).

    Args:
      system: the name of the system.
      summary: the content of `summary.json`.
      standard_rag: F1 of Standard RAG on the same questions, the baseline without training.
    """
    f1 = summary["gains"]["f1"]
    low, high = f1["ci95"]
    warm = None if f1["mean"] is None else round(f1["trained"] - f1["mean"], 2)
    scores = (warm, f1["trained"], f1["mean"], f"{low} to {high}")
    return system, summary["seed"], standard_rag, *scores, summary["wall_s"]


def markdown(columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> str:
    """A Markdown table."""
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
