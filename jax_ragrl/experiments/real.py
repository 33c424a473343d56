"""A pretrained language model on real questions (`ragrl quickstart --real`), from labels to report.

  1. demonstrations  labels of the training questions; builds the index
  2. warm start      supervised training on a few of them
  3. baselines       the untrained model without and with passages, and the warm start
  4. training        reinforcement learning from the warm start
  5. evaluation      the trained policy on held-out questions
  6. supervised      the warm start, trained on further labels for as long as 4. took, and evaluated

The last stage is the honest alternative to reinforcement learning. Every stage resumes.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from jax_ragrl.config.snapshot import save_config
from jax_ragrl.experiments.experiment import (
    headline_metric,
    paired_gain,
    quickstart,
    result_row,
    write_results,
)
from jax_ragrl.models.by_name import resolve_model
from jax_ragrl.run.build import build_components
from jax_ragrl.run.config import Job
from jax_ragrl.run.inference import evaluate_models
from jax_ragrl.run.load import load_job
from jax_ragrl.run.lock import lock_folder
from jax_ragrl.run.predictions import write_predictions
from jax_ragrl.run.workdir import claim_workdir
from jax_ragrl.runtime.jsonl import read_rows, write_json
from jax_ragrl.runtime.memory import free_memory
from jax_ragrl.warmstart.demos import WarmStart, load_warm_start, warm_start
from jax_ragrl.warmstart.make_demos import WriterConfig, make_demos

WRITER = WriterConfig("labels:answer")
# Sections of a run on which demonstrations on its questions depend.
DEMO_KEYS = (
    *("system", "recipe", "data", "index", "llm", "policy", "policies", "thinking", "grammar"),
)


def real_quickstart(
    values: dict[str, Any], warm_values: Mapping[str, Any], workdir: pathlib.Path, questions: int
) -> dict[str, Any]:
    """Runs all stages that are not finished in `workdir`.

    Returns the content of `summary.json`, see `quickstart`; also `accuracy.supervised` and
    `gain_over_supervised`. `UserError` if `workdir` holds a warm start of another config.
    """
    start = load_job(values)
    resolve_model(start.policy, weights=False)  # before the work of minutes
    warm_values = {**warm_values, "policy": start.policy, "seed": start.seed}
    run = load_warm_start(warm_values)
    settings = {**warm_values, **{key: values[key] for key in DEMO_KEYS if key in values}}
    claim_warm_start(settings | {"warm_questions": questions, "writer": WRITER.name}, workdir)
    few, all_demos = workdir / "demos.jsonl", workdir / "demos-all.jsonl"
    print("1 of 6: index and demonstrations", file=sys.stderr)
    make_demos(values, few, WRITER, questions)
    make_demos(values, all_demos, WRITER, 0)
    print("2 of 6: warm start", file=sys.stderr)
    warm = _trained_on(run, few, workdir / "warm")
    print("3 to 5 of 6: baselines, training, evaluation", file=sys.stderr)
    job = claim_workdir({**values, "policy": str(warm)}, workdir)
    summary = quickstart(job, workdir)
    free_memory()
    steps = equal_time_steps(workdir)
    print(f"6 of 6: {steps} supervised steps, which take as long as 4", file=sys.stderr)
    run = dataclasses.replace(run, policy=str(warm), steps=steps)
    # A run that is made longer has a longer alternative.
    folder = workdir / f"supervised-{steps}"
    row = _supervised_row(job, _trained_on(run, all_demos, folder), folder.with_suffix(".json"))
    after = json.loads((workdir / "trained.json").read_text(encoding="utf-8"))
    metric = headline_metric(job, has_judge=job.judge.kind != "none")
    over = paired_gain(row["scores"][metric], after["scores"][metric])
    summary["supervised_steps"], summary["accuracy"]["supervised"] = steps, row[metric]
    summary["gain_over_supervised"] = {"over": "supervised", **over}
    write_results(workdir, summary)
    return summary


def claim_warm_start(settings: Mapping[str, Any], workdir: pathlib.Path) -> None:
    """Saves the settings of the warm start; `UserError` if `workdir` has others, or is in use."""
    folder, demos = workdir / "warm", workdir / "demos.jsonl"
    # A first attempt that failed leaves an empty file.
    has_demos = demos.exists() and demos.stat().st_size > 0
    has_results = has_demos or (folder / "checkpoint").is_dir()
    if not has_results:
        # Until there are results, another process could save its own settings.
        lock_folder(folder)
    # `config.json` is that of the supervised training alone.
    save_config(folder / "settings.json", settings, renew=not has_results)


def _trained_on(run: WarmStart, demos: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Returns the checkpoint of supervised training on a file, which is trained if missing."""
    if not (out / "checkpoint").exists():
        data = dataclasses.replace(run.data, demos=str(demos))
        warm_start(dataclasses.replace(run, data=data), out)
        free_memory()
    return out / "checkpoint"


def equal_time_steps(workdir: pathlib.Path) -> int:
    """Returns the supervised steps that take as long as the training took, at least one.

    Both durations are sums over steps without the first ones, which compile.
    """
    rows = list(read_rows(workdir / "metrics.jsonl"))
    training = sum(
        row["time/rollout_s"] + row["time/train_s"] - row["time/compile_s"]
        for row in rows
        if "time/rollout_s" in row  # not the evaluation before training
    )
    seconds = [row["time/step_s"] for row in read_rows(workdir / "warm" / "metrics.jsonl")]
    usual = sorted(seconds)[len(seconds) // 2]
    return max(1, round(training / usual))


def _supervised_row(job: Job, checkpoint: pathlib.Path, file: pathlib.Path) -> dict[str, Any]:
    """Evaluates a checkpoint on the held-out questions, or reads its scores."""
    if file.is_file():
        row: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return row
    job = dataclasses.replace(job, policy=str(checkpoint))
    parts = build_components(job, file.parent)
    questions = parts.questions["test"][: job.run.test_questions]
    result = evaluate_models(job, parts, parts.models(), questions)
    result.check_answered()
    write_predictions(file.parent, "supervised", questions, result)
    write_json(file, result_row(result))
    return result_row(result)
