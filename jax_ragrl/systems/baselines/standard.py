"""Direct answering and Standard RAG: a frozen language model alone, and with k passages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_ragrl.rollout.effects import Ask, Done, Effect, Search
from jax_ragrl.rollout.roles import Role
from jax_ragrl.systems.base import Reply
from jax_ragrl.text.prompts import numbered, user_turn
from jax_ragrl.types import Hits, LLMRequest, Passage, Question, Sampling


@dataclasses.dataclass(frozen=True)
class State:
    """A question on its way to the language model. `documents` is None before the search."""

    question: Question
    documents: tuple[Passage, ...] | None = None
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class StandardRAG:
    """Retrieve `top_k` passages with the question itself, then answer. 0 is direct answering."""

    style: str = "c3po"
    top_k: int = 10

    @property
    def roles(self) -> Mapping[str, Role]:
        """No role is trained."""
        return {}

    def start(self, question: Question) -> State:
        """The only branch of a question."""
        return State(question, None if self.top_k else ())

    def wants(self, state: State) -> Effect:
        """A search, then an answer."""
        if state.answer is not None:
            return Done(state.answer, "answered")
        if state.documents is None:
            return Search(state.question.text, self.top_k)
        name = "answer" if state.documents else "answer_direct"
        documents = numbered(self.style, state.documents)
        messages = user_turn(self.style, name, question=state.question.text, documents=documents)
        return Ask(LLMRequest(name, messages, Sampling(0.0, 1.0, 256)))

    def advance(self, state: State, reply: Reply) -> State:
        """The state after the passages, or after the answer."""
        if isinstance(reply, Hits):
            return dataclasses.replace(state, documents=reply.passages)
        return dataclasses.replace(state, answer=str(reply))


def direct(style: str) -> StandardRAG:
    """The language model alone."""
    return StandardRAG(style, top_k=0)
