"""Questions with answers, and an endless, shuffled, resumable stream of them (Grain).

The order is a function of the questions' order and the seed. The state of the stream is a small
JSON object that is saved in checkpoints.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import grain

from jax_ragrl.errors import UserError
from jax_ragrl.types import Question

SPLITS = ("train", "dev", "test")
EPOCHS = 10**9  # in effect endless
FLOOR = 1 / 8  # the smallest weight of a question: after three times without a signal


def split_questions(
    questions: Sequence[Question], shares: Sequence[float]
) -> dict[str, list[Question]]:
    """Divides questions into train, dev and test, in their order.

    The hash of its id decides on a question, so that equal ids are divided equally in any file.
    Copies of a question, by its text, stay together, as far as the sizes permit.

    Raises:
      UserError: these are no three shares, or one that is above 0 gets no question.
    """
    if len(shares) != 3 or min(shares) < 0 or not abs(sum(shares) - 1) <= 1e-6:
        raise UserError(
            f"the shares {','.join(map(str, shares))} are not those of train, dev and test, which "
            "are three and have the sum 1: give for example 0.7,0.1,0.2"
        )
    first_id: dict[str, str] = {}
    keys = [first_id.setdefault(question.text, question.id) for question in questions]
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    order = sorted(range(len(questions)), key=lambda n: (digests[n], questions[n].id))
    parts: dict[str, list[Question]] = {}
    start = 0
    for split, share, end in zip(SPLITS, shares, itertools.accumulate(shares), strict=True):
        stop = round(end * len(questions))
        parts[split] = [questions[n] for n in sorted(order[start:stop])]
        if share and not parts[split]:
            raise UserError(
                f"{len(questions)} questions leave none for {split}, whose share is {share}: give "
                "more questions, a larger share, or the share 0"
            )
        start = stop
    return parts


def sample_in_order(questions: Sequence[Question], count: int) -> list[Question]:
    """Returns the same random sample every time, in order; all questions for a count of 0."""
    numbers: Sequence[int] = range(len(questions))
    if 0 < count < len(questions):
        numbers = sorted(random.Random(0).sample(numbers, count))
    return [questions[i] for i in numbers]


def fingerprint(questions: Sequence[Question]) -> str:
    """Returns 16 hex digits of SHA-256 over ids, texts, answers and gold passages, in order."""
    rows = [(q.id, q.text, q.answers, q.gold) for q in questions]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


class QuestionStream:
    """Draws questions without end; every epoch is a new permutation of all of them.

    If outcomes are noted, an epoch asks a question again with the probability of its weight: 1
    before its first outcome, then the mean of the weight before and the outcome, at least `FLOOR`.
    The seed and the position decide, so that equal outcomes give equal questions.

    A draw may span two epochs and then contain a question twice: identify its copies by their
    position, not by their id. `get_state()` can be stored as JSON; `set_state(state)` continues
    with the questions after it.

    Raises:
      UserError: there are no questions.
    """

    def __init__(self, questions: Sequence[Question], seed: int) -> None:
        if not questions:
            raise UserError("there are no questions to draw from: a run needs at least one")
        # The shuffle precedes the repetition, so that Grain permutes every epoch differently.
        source = grain.MapDataset.source(tuple(questions))
        self._dataset = source.shuffle(seed=seed).repeat(EPOCHS)
        self._seed, self._position, self._weights = seed, 0, dict[str, float]()

    def draw(self, count: int) -> list[Question]:
        """Returns the next `count` questions."""
        drawn = list[Question]()
        while len(drawn) < count:
            question, number = self._dataset[self._position], f"{self._seed} {self._position}"
            if random.Random(number).random() < self._weights.get(question.id, 1.0):
                drawn.append(question)
            self._position += 1
        return drawn

    def note(self, outcomes: Mapping[str, float]) -> None:
        """Notes whether questions, by id, had a signal when they were asked: 1, or 0 if not."""
        for name, outcome in outcomes.items():
            self._weights[name] = max((self._weights.get(name, 1.0) + outcome) / 2, FLOOR)

    def get_state(self) -> dict[str, Any]:
        return {"position": self._position, "weights": dict(self._weights)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._position, self._weights = state["position"], dict(state["weights"])
