"""Predictions of an evaluation on disk: one JSON line per question, with its trace."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.run.evaluate import Result
from jax_ragrl.runtime.jsonl import write_rows
from jax_ragrl.runtime.multihost import on_process_zero
from jax_ragrl.types import Question

FOLDER = "predictions"


def write_predictions(
    folder: pathlib.Path, name: str, questions: Sequence[Question], result: Result
) -> None:
    """Writes the predictions of one system or evaluation as `FOLDER/predictions/NAME.jsonl`.

    See `file_label`.
    """
    file = folder / FOLDER / f"{file_label(name)}.jsonl"

    def write() -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_rows(file, prediction_rows(questions, result))

    on_process_zero(write)


def file_label(name: str) -> str:
    """Replaces the characters of a name but letters, digits, dots, hyphens and underscores."""
    return re.sub(r"[^\w.-]+", "_", name)


def prediction_rows(questions: Sequence[Question], result: Result) -> Iterator[dict[str, Any]]:
    """Yields the prediction of each question as JSON values.

    These are `id`, `question`, `gold` answers, `answer`, `scores` from 0 to 1 (None for a failed
    question), `costs`, `finish_reason`, `strategy`, `faults`, `hops`, `kind`, `gold_passages`,
    `passages` and `steps`.
    """
    # A generator: with traces and passages, all rows together may not fit in memory.
    for i, question in enumerate(questions):
        trace = result.traces[i]
        yield {
            "id": question.id,
            "question": question.text,
            "gold": list(question.answers),
            "answer": result.answers[i],
            "scores": _at(result.scores, i),
            "costs": _at(result.costs, i),
            "finish_reason": trace.finish_reason,
            "strategy": trace.strategy,
            "faults": list(trace.faults),
            "hops": question.hops,
            "kind": question.kind,
            "gold_passages": list(question.gold),
            "passages": [passage._asdict() for passage in result.passages[i]],
            "steps": list(trace.steps),
        }


def _at(columns: Mapping[str, np.ndarray], i: int) -> dict[str, float | None]:
    """The finite numbers of question `i`; None for the others, which JSON does not have."""
    return {name: float(x[i]) if np.isfinite(x[i]) else None for name, x in columns.items()}
