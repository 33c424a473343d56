"""Data-parallel rollouts: each process rolls out a shard of the questions, and all get the forest.

A rollout depends only on its own question, and nodes are recorded round by round in the order of
the questions. So the forests of the shards, merged in that order, equal the forest of one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from jax_ragrl.rollout.tree import NO_PARENT, Forest, Record, build_forest
from jax_ragrl.runtime.multihost import all_gather_object
from jax_ragrl.types import Question


def data_parallel_rollout(
    questions: Sequence[Question], roll_out: Callable[[Sequence[Question]], Forest]
) -> Forest:
    """Rolls out the questions on all processes and returns the same forest on each (a collective).

    `roll_out` gets the shard of this process, and acts in an environment on its own devices. With a
    single process this is a plain call.
    """
    if jax.process_count() == 1:
        return roll_out(questions)
    shards = shard_questions(questions, jax.process_count())
    local_questions = [questions[i] for i in shards[jax.process_index()]]
    return merge_shards(questions, shards, all_gather_object(lambda: roll_out(local_questions)))


def shard_questions(questions: Sequence[Question], count: int) -> list[list[int]]:
    """Returns the ascending question indices of each of `count` shards.

    Copies of a question stay in one shard, because `collect` distinguishes them by their order.
    """
    distinct = dict.fromkeys(question.id for question in questions)
    # Round-robin over distinct ids: shards differ by at most one distinct question.
    shard_of = {name: k % count for k, name in enumerate(distinct)}
    return [[i for i, q in enumerate(questions) if shard_of[q.id] == s] for s in range(count)]


def merge_shards(
    questions: Sequence[Question], shards: Sequence[Sequence[int]], forests: Sequence[Forest]
) -> Forest:
    """Merges the forests of shards; node for node the forest of one `collect` over all questions.

    Args:
      questions: the whole batch.
      shards: the question indices of each shard, see `shard_questions`.
      forests: the forest of each shard.
    """
    # 1. Concatenate the records, with parents and questions renumbered.
    rows, failures = list[Record](), dict[int, str]()
    for shard, forest in zip(shards, forests, strict=True):
        offset = len(rows)
        for record in forest.records:
            parent = record.parent if record.parent == NO_PARENT else offset + record.parent
            question = shard[record.question]
            rows.append(dataclasses.replace(record, parent=parent, question=question))
        messages = zip(forest.failed_questions, forest.failures, strict=True)
        failures |= {shard[i]: message for i, message in messages}
    # 2. Sort them as one `collect` records them: by round, then by question. The sort is stable, so
    #    the order within a question and round stays.
    order = sorted(range(len(rows)), key=lambda n: (rows[n].round, rows[n].question))
    node = {old: new for new, old in enumerate(order)} | {NO_PARENT: NO_PARENT}
    records = [dataclasses.replace(rows[n], parent=node[rows[n].parent]) for n in order]
    return build_forest(questions, records, failures)
