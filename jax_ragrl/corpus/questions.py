"""Questions that can be scored; and in a shuffled, endless, resumable order: a Grain pipeline.

The order is a function of the questions' order and the seed. The iterator's state is a small JSON
object that goes into checkpoints.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import pathlib
import random
from collections.abc import Sequence
from typing import TypeAlias

import grain

from jax_ragrl.config.schema import local
from jax_ragrl.corpus.formats import load_questions
from jax_ragrl.errors import UserError
from jax_ragrl.types import Question

SPLITS = ("train", "dev", "validation", "test")  # files called so tell nothing of their set
EPOCHS = 10**9  # endless: Grain's own endless repetition overflows at a batch size of one
Batches: TypeAlias = grain.DatasetIterator[list[Question]]


def load_answered(path: pathlib.Path | str) -> list[Question]:
    """The questions of a file, to be scored: as `load_questions`.

    Raises `UserError` as that does, and where a question has no answer: any reply to it scores 0.
    """
    questions = load_questions(path)
    without = [q.id for q in questions if not any(map(str.strip, q.answers))]
    if without:
        raise UserError(
            f"{path}: {len(without)} of {len(questions)} questions have no answer, the first is "
            f"{without[0]!r}: whatever is replied scores 0, so leave them out"
        )
    return questions


def set_name(path: pathlib.Path) -> str:
    """What a file of questions is called: up to its first dot, or as its folder where it is called
    after a split."""
    stem = path.name.split(".")[0]
    return path.resolve().parent.name if stem in SPLITS else stem


def load_mixture(paths: str, each: int = 0) -> list[Question]:
    """The questions of one file or of several, their paths with commas between, to be scored.

    Those of several files come in turns, and the name of its set stands before an id, `nq/train_0`:
    sets number their questions alike. Of a file with more than `each` questions (0: no limit) as
    many are drawn at random, the same ones every time.

    Raises `UserError` as `load_answered`, and where two files have one name.
    """
    files = [local(path.strip()) for path in paths.split(",")]
    sets = [_some(load_answered(file), each) for file in files]
    if len(files) == 1:
        return sets[0]
    names = [set_name(file) for file in files]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"two of {paths} are called {twice[0]!r}, and their questions might share an id: "
            "rename a file, or its folder"
        )
    named = (
        [dataclasses.replace(q, id=f"{name}/{q.id}") for q in questions]
        for name, questions in zip(names, sets, strict=True)
    )
    return [q for turn in itertools.zip_longest(*named) for q in turn if q is not None]


def _some(questions: list[Question], most: int) -> list[Question]:
    return random.Random(0).sample(questions, most) if 0 < most < len(questions) else questions


def fingerprint(questions: Sequence[Question]) -> str:
    """16 hex digits of what is asked, in its order, and of the right answers."""
    asked = [(q.id, q.text, q.answers) for q in questions]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def question_batches(questions: Sequence[Question], batch_size: int, seed: int) -> Batches:
    """An endless iterator over lists of `batch_size` questions.

    Every epoch is a new permutation and shows every question once. Batches have equal size, so a
    batch may straddle two epochs and then hold a question twice: tell its copies apart by their
    position, not by their id.

    Args:
      questions: at least one.
      batch_size: at least one; may exceed the number of questions.
      seed: equal seeds give equal orders.

    Returns:
      An iterator whose `get_state()` is JSON-able and whose `set_state(state)` continues exactly
      behind the batch after which the state was taken.

    Raises:
      UserError: no questions, or a batch size below one.
    """
    if not questions or batch_size < 1:
        raise UserError(
            f"{len(questions)} questions in batches of {batch_size} make no batch: "
            "give at least one question and a batch size of at least one"
        )
    shuffled = grain.MapDataset.source(tuple(questions)).shuffle(seed=seed).repeat(EPOCHS)
    batches = shuffled.batch(batch_size, batch_fn=list)
    # The questions are in memory: reading ahead in threads would only cost.
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
