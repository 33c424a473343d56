"""The main job on the embedded default: baselines, training, evaluation, report."""

from __future__ import annotations

import json
import pathlib
import time
from typing import Any

import numpy as np
from flax import nnx

from jax_ragrl.evaluate import NoSampler, Result, evaluate
from jax_ragrl.report.build import build_report
from jax_ragrl.systems.baselines.standard import StandardRAG, direct
from jax_ragrl.text.metrics import paired_bootstrap
from jax_ragrl.train.assemble import Job, Parts, assemble
from jax_ragrl.train.loop import evaluate_policy, train
from jax_ragrl.train.trainer import acting
from jax_ragrl.types import Question


def quickstart(job: Job, workdir: pathlib.Path) -> dict[str, Any]:
    """Trains C-3PO and compares it with its warm start, Standard RAG and direct answering.

    Every part that is already in `workdir` is taken up where it stands. Returns what it writes to
    `summary.json`; accuracies are cover-EM in percent on the same held-out questions.
    """
    begun = time.perf_counter()
    parts = assemble(job, workdir)
    questions = parts.questions["test"][: job.run.test_questions]
    before = baselines(job, parts, questions, workdir / "baselines.json")
    trainer, models = train(job, parts, workdir)
    after = evaluate_policy(job, parts, *acting(trainer, models), questions)
    summary = summarise(job, parts, before, after, workdir)
    summary["wall_s"] = round(time.perf_counter() - begun, 1)
    write_json(workdir / "summary.json", summary)
    build_report(workdir)
    return summary


def baselines(
    job: Job, parts: Parts, questions: tuple[Question, ...], file: pathlib.Path
) -> dict[str, Any]:
    """Scores of what needs no training, kept in `file`: a resumed run reads them."""
    if file.exists():
        return json.loads(file.read_text(encoding="utf-8"))
    style, nothing = job.system.style, NoSampler()
    graph, params = nnx.split(parts.policy, nnx.Param)
    results = {
        "direct": evaluate(direct(style), questions, nothing, parts.retriever, parts.llm),
        "standard_rag": evaluate(
            StandardRAG(style, job.system.top_k), questions, nothing, parts.retriever, parts.llm
        ),
        "warm_start": evaluate_policy(job, parts, graph, params, questions),
    }
    rows = {name: row(result) for name, result in results.items()}
    write_json(file, rows)
    return rows


def row(result: Result) -> dict[str, Any]:
    """A result as JSON: its summary, and the cover-EM of every question."""
    return {"scores": result.scores["cover_em"].tolist(), **result.summary()}


def summarise(
    job: Job, parts: Parts, before: dict[str, Any], after: Result, workdir: pathlib.Path
) -> dict[str, Any]:
    """What the run showed."""
    warm = np.array(before["warm_start"]["scores"])
    trained = after.scores["cover_em"]
    gain, low, high = paired_bootstrap(trained, warm)
    accuracy = {name: rows["cover_em"] for name, rows in before.items()}
    total = sum(after.strategies.values())
    return {
        "steps": job.run.steps,
        "seed": job.seed,
        "questions": len(trained),
        "metric": "cover-EM, percent",
        "reader": parts.llm.name,
        "accuracy": {**accuracy, "trained": round(100 * after.mean(), 2)},
        "gain": {
            "mean": round(100 * gain, 2),
            "ci95": [round(100 * low, 2), round(100 * high, 2)],
        },
        "strategy_share": {k: round(n / total, 4) for k, n in sorted(after.strategies.items())},
        "ended": dict(after.ended),
        "costs": {name: rows["costs"] for name, rows in before.items()}
        | {"trained": after.summary()["costs"]},
        "checkpoint": str(workdir / "checkpoints" / str(job.run.steps)),
        "report": str(workdir / "report.html"),
    }


def write_json(file: pathlib.Path, value: Any) -> None:
    """Writes whole or not at all."""
    draft = file.with_suffix(".tmp")
    draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    draft.replace(file)
