"""A batch rolled out by all hosts: each takes its share of the questions, all get the forest.

A rollout depends on its question alone, and nodes are recorded round by round, in the order of the
questions. So the parts, put together in that order, are the forest of one host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax

from jax_ragrl.rollout.tree import NO_PARENT, Forest, Record, plant
from jax_ragrl.runtime.multihost import gathered
from jax_ragrl.types import Question


def in_shares(
    questions: Sequence[Question], roll_out: Callable[[Sequence[Question]], Forest]
) -> Forest:
    """`roll_out(questions)`, each process with its share, in an environment on its own devices.

    All processes call it together and get the same forest. On one process it is a plain call.
    """
    if jax.process_count() == 1:
        return roll_out(questions)
    shares = split(questions, jax.process_count())
    own = [questions[i] for i in shares[jax.process_index()]]
    return merge(questions, shares, gathered(lambda: roll_out(own)))


def split(questions: Sequence[Question], count: int) -> list[list[int]]:
    """The numbers of the questions that each of `count` hosts rolls out, ascending.

    A question that is there several times stays in one share: `collect` tells its copies apart by
    their order.
    """
    host = {name: k % count for k, name in enumerate(dict.fromkeys(q.id for q in questions))}
    return [[i for i, q in enumerate(questions) if host[q.id] == h] for h in range(count)]


def merge(
    questions: Sequence[Question], shares: Sequence[Sequence[int]], parts: Sequence[Forest]
) -> Forest:
    """The forest of all questions from those of its shares, node for node that of one `collect`."""
    rows, failures = list[Record](), dict[int, str]()
    for share, part in zip(shares, parts, strict=True):
        before = len(rows)
        for record in part.records:
            parent = record.parent if record.parent == NO_PARENT else before + record.parent
            number = share[record.question]
            rows.append(dataclasses.replace(record, parent=parent, question=number))
        told = zip(part.failed, part.failures, strict=True)
        failures |= {share[i]: failure for i, failure in told}
    order = sorted(range(len(rows)), key=lambda n: (rows[n].round, rows[n].question))
    node = {old: new for new, old in enumerate(order)} | {NO_PARENT: NO_PARENT}
    records = [dataclasses.replace(rows[n], parent=node[rows[n].parent]) for n in order]
    return plant(questions, records, failures)
