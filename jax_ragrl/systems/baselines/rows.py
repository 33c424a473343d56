"""Supervised rows for baselines whose generator or classifier is fine-tuned.

Vanilla RAG + SFT learns to answer from what the retriever found. RetRobust (Yoran et al. 2024,
"Making Retrieval-Augmented Language Models Robust to Irrelevant Context") learns from contexts of
which some hold what is needed and some hold nothing that bears on the question; the target is the
answer either way. InstructRAG (Wei et al. 2025, "InstructRAG: Instructing Retrieval-Augmented
Generation via Self-Synthesized Rationales") learns to explain how the documents lead to the answer,
from explanations that a language model wrote with the answer before it.

Departures from the papers: the prompt is the one that every system of a table answers from, and the
target is the bare answer. RetRobust shows one passage a row, of the first rank, a low rank or at
random; here a row shows as many as at inference. InstructRAG's target is the rationale
alone; here a line that states the answer ends it, and one that does not hold it gives no row.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence
from typing import NamedTuple

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.runtime.portable_random import pick, shuffled
from jax_ragrl.text.metrics import cover_match_tokens
from jax_ragrl.text.prompts import numbered, user_turn
from jax_ragrl.types import Hits, LLMRequest, Message, Passage, Question, Sampling

ANSWER = "answer"
KINDS = ("relevant", "low", "random")
RATIONALE = Sampling(0.0, 1.0, 512)  # how an explanation is written, in training and at inference


class Row(NamedTuple):
    """A conversation, and what `role` is to write next."""

    messages: tuple[Message, ...]
    target: str
    role: str


def answer_row(style: str, question: Question, documents: Sequence[Passage]) -> Row:
    """The first gold answer as the target of the answer prompt."""
    values = {"question": question.text, "documents": numbered(style, documents)}
    name = ANSWER if documents else "answer_direct"
    return Row(user_turn(style, name, **values), question.answers[0], ANSWER)


def vanilla_rows(
    style: str, questions: Sequence[Question], found: Sequence[Hits], k: int
) -> list[Row]:
    """One row a question: its answer from the first `k` passages that its search found.

    Questions without a gold answer give no row, here and in the functions below.
    """
    return [
        answer_row(style, question, hits.passages[:k])
        for question, hits in zip(questions, found, strict=True)
        if question.answers
    ]


def robust_rows(
    style: str,
    questions: Sequence[Question],
    found: Sequence[Hits],
    corpus: Sequence[Passage],
    k: int,
    rng: random.Random,
) -> list[Row]:
    """One row a question, its context in random order and drawn evenly from three kinds.

      relevant  what bears on the question, filled up with the best of what does not
      low       the lowest ranks of the search, without what bears on it
      random    passages of the corpus, without what bears on it

    Args:
      found: searches deeper than `k`, so that there are low ranks.
      corpus: where gold and random passages come from.
      k: passages a row, at most.
    """
    wanted = {name for question in questions for name in question.gold}
    named = collections.defaultdict(list)
    for passage in corpus:
        for name in {passage.id, passage.title} & wanted:
            named[name].append(passage)
    rows = []
    for question, hits in zip(questions, found, strict=True):
        kind = pick(rng, KINDS)
        idle = [p for p in hits.passages if not bears_on(question, p)]
        if kind == "low":
            chosen = idle[-k:]
        elif kind == "random":
            drawn = dict.fromkeys(pick(rng, corpus) for _ in range(4 * k))
            chosen = [p for p in drawn if not bears_on(question, p)][:k]
        else:
            gold = [p for name in question.gold for p in named[name]]
            needed = list(dict.fromkeys(gold + [p for p in hits.passages if p not in idle]))[:k]
            chosen = needed + idle[: k - len(needed)]
        if question.answers:
            rows.append(answer_row(style, question, shuffled(rng, chosen)))
    return rows


def bears_on(question: Question, passage: Passage) -> bool:
    """Whether a passage is gold, or, where no gold is known, holds an answer."""
    if question.gold:
        return passage.id in question.gold or passage.title in question.gold
    return bool(cover_match_tokens(f"{passage.title}\n{passage.text}", question.answers))


def explained_rows(
    style: str, questions: Sequence[Question], found: Sequence[Hits], k: int, writer: FrozenLLM
) -> list[Row]:
    """One row a question: how its first `k` passages lead to the answer, then the answer.

    A rationale that does not hold the first gold answer, in whole words, gives no row, nor does a
    reply that failed.

    Args:
      writer: is asked once a question, with the answer in its prompt.
    """
    pairs = zip(questions, found, strict=True)
    shown = [(question, hits.passages[:k]) for question, hits in pairs if question.answers]
    replies = writer.complete([explain(style, *pair) for pair in shown])
    rows = []
    for (question, documents), reply in zip(shown, replies, strict=True):
        answer, failed = question.answers[0], isinstance(reply, EffectError)
        if not failed and cover_match_tokens(str(reply), (answer,)):
            target = concluded(str(reply), answer)
            rows.append(Row(instruct(style, question, documents), target, ANSWER))
    return rows


def explain(style: str, question: Question, documents: Sequence[Passage]) -> LLMRequest:
    """What asks for a rationale, the first gold answer being told."""
    values = {"question": question.text, "documents": numbered(style, documents)}
    messages = user_turn(style, "explain", answer=question.answers[0], **values)
    return LLMRequest("explain", messages, RATIONALE)


def instruct(style: str, question: Question, documents: Sequence[Passage]) -> tuple[Message, ...]:
    """What a generator that explains is shown."""
    values = {"question": question.text, "documents": numbered(style, documents)}
    return user_turn(style, "instruct", **values)


def concluded(rationale: str, answer: str) -> str:
    """A rationale with the answer as its last line."""
    return f"{rationale.strip()}\nSo the answer is: {answer}"
