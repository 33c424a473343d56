"""What a frozen language model must be able to do, as supervised rows for a tiny one.

It writes a roadmap, it answers from documents, and it knows the famous facts of one world by heart
(names recur from world to world with other facts, so it can know only one).
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

# The share of a rollout's requests that become rows, by purpose.
SHARES = {"roadmap": 0.5, "answer": 0.25}


class Listener:
    """A language model that remembers what it was asked."""

    def __init__(self, llm: FrozenLLM):
        self._llm, self.name = llm, llm.name
        self.heard: list[LLMRequest] = []

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """The replies of the model behind it."""
        self.heard += requests
        return self._llm.complete(requests)


def careful_reader(world: World, style: str) -> WorldReader:
    """A reader that reads everything and is never distracted."""
    return WorldReader(world, style=style, limit=1000, noise=0.0, confusion=0.0)


def reading_rows(
    heard: Sequence[LLMRequest], reader: FrozenLLM, tokenizer: ChatTokenizer, rng: random.Random
) -> list[Example]:
    """A share of the roadmaps and answers that were asked for, as the careful reader gives them."""
    distinct = dict.fromkeys(request._replace(seed=0) for request in heard)
    chosen = [request for request in distinct if rng.random() < SHARES.get(request.purpose, 0.0)]
    return examples(chosen, reader, tokenizer)


def fact_rows(
    world: World, style: str, tokenizer: ChatTokenizer, rng: random.Random, count: int
) -> list[Example]:
    """`count` questions about single facts of the known world, without documents.

    Half of them ask for famous facts; of the others nothing is known.
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
    """One supervised row a request; its role is the request's purpose."""
    return [
        example(tokenizer, request.messages, str(reply), request.purpose)
        for request, reply in zip(requests, reader.complete(requests), strict=True)
    ]
