"""A whole job: baselines, training, evaluation, report; `ragrl quickstart` on the default."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_ragrl.corpus.questions import fingerprint
from jax_ragrl.report.build import build_report
from jax_ragrl.run.components import Parts, assemble
from jax_ragrl.run.config import Job
from jax_ragrl.run.evaluate import METRIC_NAMES, NoSampler, Result, evaluate
from jax_ragrl.run.inference import evaluate_models
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import by_first
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from jax_ragrl.text.metrics import paired_bootstrap
from jax_ragrl.train.loop import acting_models, train
from jax_ragrl.types import Question


def quickstart(job: Job, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains a system and compares it with its warm start, Standard RAG and direct answering.

    Every part that is already in `workdir` is taken up where it stands. Returns what it writes to
    `summary.json`; scores are the recipe's metric in percent, or the verdict of a judge where there
    is one, on the same held-out questions. Raises `UserError` where none of these could be asked.
    """
    begun = time.perf_counter()
    parts = assemble(job, workdir)
    questions = parts.questions["test"][: job.run.test_questions]
    before = baselines(job, parts, questions, workdir / "baselines.json")
    models = acting_models(train(job, parts, workdir))
    after = evaluate_models(job, parts, models, questions)
    after.check_answered()
    summary = summarise(job, parts, before, after, workdir)
    summary["wall_s"] = round(time.perf_counter() - begun, 1)
    trained = {"asked": fingerprint(questions), **row(after)}
    by_first(lambda: finish(workdir, trained, summary))
    return summary


def finish(workdir: pathlib.Path, trained: dict[str, Any], summary: dict[str, Any]) -> None:
    """Writes what a job ends with."""
    write_json(workdir / "trained.json", trained)
    write_json(workdir / "summary.json", summary)
    build_report(workdir)


def baselines(
    job: Job, parts: Parts, questions: tuple[Question, ...], file: pathlib.Path
) -> dict[str, Any]:
    """Scores of what needs no training, kept in `file`: a resumed run reads them.

    Raises `UserError` where one of them could be asked nothing.
    """
    known = by_first(lambda: json.loads(file.read_text("utf-8")) if file.exists() else None)
    if known is not None:
        return known
    style = job.run.baselines
    standard, alone = StandardRAG(style, job.recipe.system.top_k), direct(style)
    environment = parts.environment(NoSampler())._replace(judge=None)  # graded all at once
    results = {
        "direct": evaluate(alone, questions, environment, judge=parts.judge),
        "standard_rag": evaluate(standard, questions, environment, judge=parts.judge),
        "warm_start": evaluate_models(job, parts, parts.models(), questions),
    }
    for result in results.values():
        result.check_answered()
    rows = {name: row(result) for name, result in results.items()}
    by_first(lambda: write_json(file, rows))
    return rows


def row(result: Result) -> dict[str, Any]:
    """A result as JSON: its summary, and every score of every question."""
    scores = {metric: values.tolist() for metric, values in result.scores.items()}
    return {"scores": scores, **result.summary()}


def summarise(
    job: Job, parts: Parts, before: dict[str, Any], after: Result, workdir: pathlib.Path
) -> dict[str, Any]:
    """What the run showed."""
    metric = job.recipe.metric if parts.judge is None else "judge"
    accuracy = {name: rows[metric] for name, rows in before.items()}
    warm = before["warm_start"]["scores"]
    gains = {name: gain(warm[name], scores) for name, scores in after.scores.items()}
    total = sum(after.strategies.values())
    return {
        "steps": job.run.steps,
        "seed": job.seed,
        "questions": len(after.scores[metric]),
        "metric": f"{METRIC_NAMES.get(metric, metric)}, percent",
        "reader": parts.llm.name,
        "accuracy": {**accuracy, "trained": after.summary()[metric]},
        "gain": {"over": "warm_start", **gains[metric]},
        "gains": gains,
        "strategy_share": {k: round(n / total, 4) for k, n in sorted(after.strategies.items())},
        "ended": dict(after.ended),
        "costs": {name: rows["costs"] for name, rows in before.items()}
        | {"trained": after.summary()["costs"]},
        "checkpoint": str(workdir / "checkpoints" / str(job.run.steps)),
        "report": str(workdir / "report.html"),
    }


def gain(over: Sequence[float], scores: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """The mean of a trained policy's scores in percent, and what it won over those of another, such
    as its warm start, on the same questions in the same order (95 % bootstrap).

    Over the `pairs`: the questions on which the environment failed neither time. Without any the
    numbers are None.
    """
    before, trained = np.array(over, np.float64), np.asarray(scores, np.float64)
    both = np.isfinite(before) & np.isfinite(trained)
    pairs = int(both.sum())
    if not pairs:
        return {"trained": None, "mean": None, "ci95": [None, None], "pairs": 0}
    mean, low, high = paired_bootstrap(trained[both], before[both])
    interval = [round(100 * low, 2), round(100 * high, 2)]
    score = round(100 * float(trained[both].mean()), 2)
    return {"trained": score, "mean": round(100 * mean, 2), "ci95": interval, "pairs": pairs}
