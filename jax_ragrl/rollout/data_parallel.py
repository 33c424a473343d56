"""Data-parallel rollouts: each process makes a shard of the rollouts, and all get the forest.

A branch depends only on its own question and path, and nodes are recorded round by round in the
order of the questions and paths. So the forests of the shards, merged in that order, equal the
forest of one process. Processes that outnumber the questions share the copies of each question (the
rollouts of a group); those that outnumber the copies, too, roll out nothing. With fewer processes,
copies stay together, because they share their prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax

from jax_ragrl.rollout.tree import NO_PARENT, Forest, Record, build_forest, reorder
from jax_ragrl.runtime.multihost import all_gather_object
from jax_ragrl.types import Question

# The indices of the questions of a shard, ascending, and the numbers of the copies of each.
Shard = Mapping[int, Sequence[int]]
# From questions, and the numbers of the copies of each, to their forest, as `collect`.
RollOut = Callable[[Sequence[Question], Sequence[Sequence[int]]], Forest]


def data_parallel_rollout(
    questions: Sequence[Question], roll_out: RollOut, rollouts: int = 1
) -> Forest:
    """Rolls out the questions on all processes and returns the same forest on each (a collective).

    Args:
      questions: the batch.
      roll_out: rolls out the shard of this process in an environment on its own devices.
      rollouts: rollouts per question.
    """
    return gather_shards(questions, lambda: shard_rollout(questions, roll_out, rollouts), rollouts)


def shard_rollout(questions: Sequence[Question], roll_out: RollOut, rollouts: int = 1) -> Forest:
    """Rolls out the shard of this process (the arguments of `data_parallel_rollout`), without a
    message to another one."""
    own = shard_questions(questions, jax.process_count(), rollouts)[jax.process_index()]
    return roll_out([questions[i] for i in own], [*own.values()])


def gather_shards(
    questions: Sequence[Question], shard: Callable[[], Forest], rollouts: int = 1
) -> Forest:
    """Returns the forest of all questions on each process, from the shards (a collective).

    Args:
      questions: the batch.
      shard: returns the result of `shard_rollout`; its error is raised on all processes.
      rollouts: rollouts per question.
    """
    forests = all_gather_object(shard)
    if len(forests) == 1:
        return forests[0]
    return merge_shards(questions, shard_questions(questions, len(forests), rollouts), forests)


def shard_questions(
    questions: Sequence[Question], count: int, rollouts: int = 1
) -> list[dict[int, list[int]]]:
    """Divides the rollouts of questions into `count` shards.

    A question that occurs several times has the same shards each time, because `collect`
    distinguishes its occurrences by their order.

    Args:
      questions: the batch.
      count: the number of shards.
      rollouts: rollouts per question.
    """
    number = {name: k for k, name in enumerate(dict.fromkeys(q.id for q in questions))}
    shards: list[dict[int, list[int]]] = [{} for _ in range(count)]
    for i, question in enumerate(questions):
        # Round-robin over distinct ids; more shards than ids are dealt out a second time.
        own = range(number[question.id] % count, count, len(number))
        for rollout in range(rollouts):
            # Likewise over the rollouts of a question.
            shards[own[rollout % len(own)]].setdefault(i, []).append(rollout)
    return shards


def merge_shards(
    questions: Sequence[Question], shards: Sequence[Shard], forests: Sequence[Forest]
) -> Forest:
    """Merges the forests of shards; node for node the forest of one `collect` over all questions.

    Args:
      questions: the whole batch.
      shards: the questions and rollouts of each shard, see `shard_questions`.
      forests: the forest of each shard.
    """
    # Parents and questions are renumbered.
    records, failures = list[Record](), dict[int, str]()
    for shard, forest in zip(shards, forests, strict=True):
        indices, first = [*shard], len(records)
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
