"""Data-parallel rollouts: each process makes a shard of the rollouts, and all get the forest.

A branch depends only on its own question and path, so the forests of the shards, merged in the
order of questions and paths, equal the forest of one process. Processes that outnumber the
questions share the copies of each question (the rollouts of a group). With fewer processes, copies
stay together, because they share their prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import jax

from jax_ragrl.rollout.tree import NO_PARENT, Forest, Record, build_forest, reorder
from jax_ragrl.types import Question


def own_shard(
    questions: Sequence[Question], rollouts: int = 1
) -> tuple[list[Question], list[list[int]]]:
    """Returns the questions of this process, and the numbers of the copies of each."""
    own = shard_questions(questions, jax.process_count(), rollouts)[jax.process_index()]
    return [questions[i] for i in own], [*own.values()]


def shard_questions(
    questions: Sequence[Question], count: int, rollouts: int = 1
) -> list[dict[int, list[int]]]:
    """Divides the rollouts of questions into `count` shards.

    A shard has the indices of its questions, ascending, and the numbers of the copies of each. A
    question that occurs several times has the same shards each time, because `collect`
    distinguishes its occurrences by their order.
    """
    number = {name: k for k, name in enumerate(dict.fromkeys(q.id for q in questions))}
    shards: list[dict[int, list[int]]] = [{} for _ in range(count)]
    for i, question in enumerate(questions):
        # Round-robin over distinct ids; more shards than ids are dealt out a second time.
        own = range(number[question.id] % count, count, len(number))
        for rollout in range(rollouts):
            shards[own[rollout % len(own)]].setdefault(i, []).append(rollout)
    return shards


def merge_shards(
    questions: Sequence[Question], forests: Sequence[Forest], rollouts: int = 1
) -> Forest:
    """Merges the forests of shards; node for node the forest of one `collect` over all questions.

    `forests` has the forest of each process, from `own_shard`.
    """
    if len(forests) == 1:
        return forests[0]
    return join_forests(questions, forests, shard_questions(questions, len(forests), rollouts))


def join_forests(
    questions: Sequence[Question],
    forests: Sequence[Forest],
    numbers: Sequence[Iterable[int]],
) -> Forest:
    """Joins forests, node for node that of one `collect` over `questions`, without rewards.

    `numbers` has, for each forest, the indices of its questions in `questions`.
    """
    # 1. Concatenate the records, with parents and questions renumbered.
    records, failures = list[Record](), dict[int, str]()
    for own, forest in zip(numbers, forests, strict=True):
        indices, first = [*own], len(records)
        for record in forest.records:
            parent = record.parent if record.parent == NO_PARENT else first + record.parent
            question = indices[record.question]
            records.append(dataclasses.replace(record, parent=parent, question=question))
        messages = zip(forest.failed_questions, forest.failures, strict=True)
        failures |= {indices[i]: message for i, message in messages}
    # The order of one `collect`. The sort is stable, so the order of nodes with one path stays.
    places = [(r.round, r.question, r.path) for r in records]
    order = sorted(range(len(records)), key=places.__getitem__)
    return build_forest(questions, reorder(records, order), failures)
