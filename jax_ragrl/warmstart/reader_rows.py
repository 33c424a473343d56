"""Supervised examples that teach a tiny model the tasks of a frozen language model.

The tasks: write a roadmap, answer from documents, and know the famous facts of one world by heart
(names recur in other worlds with other facts, so the model can know only one world).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from jax_ragrl.corpus.world import RELATIONS, World
from jax_ragrl.errors import EffectError
from jax_ragrl.learner.imitation import Example, example
from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.llm.reader import WorldReader
from jax_ragrl.runtime.portable_random import pick
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest

# Fraction of the requests of a rollout that become examples, by purpose.
FRACTIONS = {"roadmap": 0.5, "answer": 0.25}


class RecordingLLM:
    """A language model that records its requests."""

    def __init__(self, llm: FrozenLLM):
        self._llm, self.name = llm, llm.name
        self.requests: list[LLMRequest] = []

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """Returns the replies of the wrapped model."""
        self.requests += requests
        return self._llm.complete(requests)


def careful_reader(world: World, style: str) -> WorldReader:
    """Returns a reader that reads all documents and makes no errors."""
    return WorldReader(world, style=style, limit=1000, noise=0.0, confusion=0.0)


def reading_examples(
    requests: Sequence[LLMRequest], reader: FrozenLLM, tokenizer: ChatTokenizer, rng: random.Random
) -> list[Example]:
    """Returns examples of a fraction of the distinct requested roadmaps and answers."""
    distinct = dict.fromkeys(request._replace(seed=0) for request in requests)
    sample = [request for request in distinct if rng.random() < FRACTIONS.get(request.purpose, 0.0)]
    return examples(sample, reader, tokenizer)


def fact_examples(
    world: World, style: str, tokenizer: ChatTokenizer, rng: random.Random, count: int
) -> list[Example]:
    """Returns examples of questions about single facts, without documents.

    Half of them ask for famous facts; to the others the target is that the answer is unknown.
    """
    famous = sorted(world.famous)
    others = sorted(set(world.source) - world.famous)
    pairs = [pick(rng, others if i % 2 else famous) for i in range(count)]
    texts = [pick(rng, RELATIONS[relation].asks).format(entity) for entity, relation in pairs]
    requests = [
        LLMRequest("answer_direct", user_turn(style, "answer_direct", question=text))
        for text in texts
    ]
    return examples(requests, careful_reader(world, style), tokenizer)


def examples(
    requests: Sequence[LLMRequest], reader: FrozenLLM, tokenizer: ChatTokenizer
) -> list[Example]:
    """Returns one example per request, whose role is the purpose of the request."""
    return [
        example(tokenizer, request.messages, str(reply), request.purpose)
        for request, reply in zip(requests, reader.complete(requests), strict=True)
    ]
