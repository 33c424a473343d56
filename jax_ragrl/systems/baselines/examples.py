"""Supervised examples for baselines whose generator or classifier is fine-tuned.

Vanilla RAG + SFT learns to answer from the passages of the retriever. RetRobust (Yoran et al. 2024,
"Making Retrieval-Augmented Language Models Robust to Irrelevant Context") learns to answer from
contexts with and without relevant passages. InstructRAG (Wei et al. 2025, "InstructRAG: Instructing
Retrieval-Augmented Generation via Self-Synthesized Rationales") learns to explain how the documents
lead to the answer, from explanations of a language model that read the answer.

Departures from the papers
  1. The prompt is the answer prompt of every system of a table, and the target is the bare answer.
  2. RetRobust shows one passage per example, of the first rank, of a low rank or at random; here an
     example shows as many passages as at inference.
  3. The target of InstructRAG is only the rationale; here a last line states the answer, and a
     rationale that does not contain the answer yields no example.
  4. There are no configurations at the papers' size, only those in `configs/tiny`.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Sequence
from typing import NamedTuple

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import FrozenLLM, ask
from jax_ragrl.runtime.portable_random import pick, shuffled
from jax_ragrl.text.metrics import cover_match_tokens
from jax_ragrl.text.prompts import question_turn
from jax_ragrl.types import Hits, LLMRequest, Message, Passage, Question, Sampling

ANSWER = "answer"
# The order is part of the seeded draws: an index into this tuple is drawn.
KINDS = ("relevant", "low", "random")
RATIONALE = Sampling(0.0, 1.0, 512)  # the same for the writer of explanations and at inference


class ChatExample(NamedTuple):
    """A supervised example: a conversation, and the text that `role` learns to write next."""

    messages: tuple[Message, ...]
    target: str
    role: str


def answer_example(style: str, question: Question, documents: Sequence[Passage]) -> ChatExample:
    """Returns the example whose target is the first gold answer; there may be no documents."""
    prompt = question_turn(style, ANSWER if documents else "answer_direct", question, documents)
    return ChatExample(prompt, question.answers[0], ANSWER)


def vanilla_examples(
    style: str, questions: Sequence[Question], results: Sequence[Hits], k: int
) -> list[ChatExample]:
    """Returns one example per question, with the first `k` passages of its search.

    Questions without a gold answer yield no example, here and in the functions below.
    """
    return [
        answer_example(style, question, hits.passages[:k])
        for question, hits in zip(questions, results, strict=True)
        if question.answers
    ]


def robust_examples(
    style: str,
    questions: Sequence[Question],
    results: Sequence[Hits],
    corpus: Sequence[Passage],
    k: int,
    rng: random.Random,
) -> list[ChatExample]:
    """Returns one example per question, its context shuffled and of one of three kinds, evenly.

      relevant  the relevant passages, filled up with the best irrelevant ones
      low       the lowest ranks of the search, without relevant passages
      random    passages of the corpus, without relevant passages

    A context has at most `k` passages; the `results` are deeper, so that there are low ranks.
    """
    names = {name for question in questions for name in question.gold}
    passages_of = collections.defaultdict(list)
    for passage in corpus:
        for name in passage.names & names:
            passages_of[name].append(passage)
    examples = []
    for question, hits in zip(questions, results, strict=True):
        # Draw for questions without a gold answer too: the other draws do not depend on them.
        kind = pick(rng, KINDS)
        irrelevant = [p for p in hits.passages if not is_relevant(question, p)]
        if kind == "low":
            context = irrelevant[-k:]
        elif kind == "random":
            # Some draws repeat or are relevant: 4 k draws nearly always leave k passages.
            draws = dict.fromkeys(pick(rng, corpus) for _ in range(4 * k))
            context = [p for p in draws if not is_relevant(question, p)][:k]
        else:
            gold = [p for name in question.gold for p in passages_of[name]]
            hits_in_order = [p for p in hits.passages if p not in irrelevant]
            relevant = list(dict.fromkeys(gold + hits_in_order))[:k]
            context = relevant + irrelevant[: k - len(relevant)]
        if question.answers:
            examples.append(answer_example(style, question, shuffled(rng, context)))
    return examples


def is_relevant(question: Question, passage: Passage) -> bool:
    """Returns whether a passage is gold or, if the question names no gold, contains an answer."""
    if question.gold:
        return not passage.names.isdisjoint(question.gold)
    return bool(cover_match_tokens(f"{passage.title}\n{passage.text}", question.answers))


def rationale_examples(
    style: str, questions: Sequence[Question], results: Sequence[Hits], k: int, writer: FrozenLLM
) -> list[ChatExample]:
    """Returns one example per question: how its first `k` passages lead to the answer.

    A rationale without the first gold answer in whole words yields no example, nor does a failed
    reply. The `writer` gets one request per question, all in one call.
    """
    pairs = zip(questions, results, strict=True)
    contexts = [(question, hits.passages[:k]) for question, hits in pairs if question.answers]
    prompts = [
        question_turn(style, "explain", question, documents, answer=question.answers[0])
        for question, documents in contexts
    ]
    requests = [LLMRequest("explain", prompt, RATIONALE) for prompt in prompts]
    replies = ask(writer, requests)
    examples = []
    for (question, documents), reply in zip(contexts, replies, strict=True):
        answer, is_error = question.answers[0], isinstance(reply, EffectError)
        if not is_error and cover_match_tokens(str(reply), (answer,)):
            target = f"{str(reply).strip()}\nSo the answer is: {answer}"
            prompt = instruct_prompt(style, question, documents)
            examples.append(ChatExample(prompt, target, ANSWER))
    return examples


def instruct_prompt(
    style: str, question: Question, documents: Sequence[Passage]
) -> tuple[Message, ...]:
    """Returns the prompt of a generator that explains its answer."""
    return question_turn(style, "instruct", question, documents)
