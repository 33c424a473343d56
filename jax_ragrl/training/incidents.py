"""Incident files: the batch of a step in which the guard acted, `incidents/step-<step>.json`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.rollout.tree import LEAF, Forest, Record
from jax_ragrl.run.indicators import Incident
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import is_process_zero

FOLDER = "incidents"


def write_incidents(
    workdir: pathlib.Path, incidents: Sequence[Incident], row: Mapping[str, Any], forest: Forest
) -> None:
    """Writes the incidents of a step with its metrics, questions and rollouts.

    A resumed run that repeats the step writes the same file again.

    Args:
      workdir: the folder of the run.
      incidents: the incidents of the step, at least one.
      row: the row of the step in `metrics.jsonl`.
      forest: the rollouts of the step.
    """
    if not is_process_zero():
        return
    # One file per step: an unattended run may have many incidents, of which the first one matters.
    file = workdir / FOLDER / f"step-{incidents[0].step}.json"
    file.parent.mkdir(exist_ok=True)
    batch = list(questions_of(forest))
    value = {"incidents": [x._asdict() for x in incidents], "metrics": row, "questions": batch}
    write_json(file, value)


def questions_of(forest: Forest) -> Iterator[dict[str, Any]]:
    """Yields each question of a batch with a summary of its rollouts."""
    failures = dict(zip(forest.failed_questions, forest.failures, strict=True))
    for number, question in enumerate(forest.questions):
        nodes = np.flatnonzero(forest.question_N == number).tolist()
        yield {
            "id": question.id,
            "question": question.text,
            "answers": list(question.answers),
            "failure": failures.get(number, ""),
            "rollouts": [
                _rollout(forest.records[n], float(forest.reward_N[n]))
                for n in nodes
                if forest.leaf_N[n]
            ],
            "actions": [_action(forest.records[n]) for n in nodes if not forest.leaf_N[n]],
        }


def _rollout(leaf: Record, reward: float) -> dict[str, Any]:
    return {
        "reward": reward,
        "answer": leaf.answer,
        "finish_reason": leaf.finish_reason,
        "calls": len(leaf.calls),
    }


def _action(record: Record) -> dict[str, Any]:
    # Every record but a leaf, which `_rollout` describes, has an action.
    assert record.role != LEAF and record.action is not None
    logps = record.action.logps
    return {
        "role": record.role,
        "path": list(record.path),
        "text": record.action.text,
        "error": record.parse_error,
        "multiplicity": record.multiplicity,
        "logp_per_token": float(np.mean(logps)) if logps else None,
    }
