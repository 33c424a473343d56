"""Direct answering and Standard RAG: a frozen language model alone, and with k passages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_ragrl.rollout.effects import CallLLM, Done, Effect, Search
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.system import Reply
from jax_ragrl.rollout.system import State as BaseState
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import Hits, LLMRequest, Passage, Question, Sampling


@dataclasses.dataclass(frozen=True)
class State(BaseState):
    """The state of a question. `phase` names the next effect: `search`, `answer` or `done`."""

    question: Question
    phase: str = "search"
    documents: tuple[Passage, ...] = ()
    answer: str | None = None


@dataclasses.dataclass(frozen=True)
class StandardRAG:
    """Retrieves `top_k` passages for the question itself, then answers; 0 is direct answering."""

    style: str = "c3po"
    top_k: int = 10

    @property
    def roles(self) -> Mapping[str, Role]:
        """The trained roles; none."""
        return {}

    def start(self, question: Question) -> State:
        """Returns the initial state, which skips the search if `top_k` is 0."""
        return State(question, "search" if self.top_k else "answer")

    def next_effects(self, state: State) -> Effect:
        """Returns the search, then the request for the answer."""
        match state.phase:
            case "search":
                return Search(state.question.text, self.top_k)
            case "answer":
                return self._answer(state)
            case _:
                return Done(state.answer, "answered")

    def advance(self, state: State, reply: Reply) -> State:
        """Returns the state after the passages or after the answer."""
        if isinstance(reply, Hits):
            return dataclasses.replace(state, phase="answer", documents=reply.passages)
        return dataclasses.replace(state, phase="done", answer=str(reply))

    def _answer(self, state: State) -> CallLLM:
        # Without documents the model answers from memory, by another prompt.
        name = "answer" if state.documents else "answer_direct"
        documents = format_passages(self.style, state.documents)
        messages = user_turn(self.style, name, question=state.question.text, documents=documents)
        return CallLLM(LLMRequest(name, messages, Sampling(0.0, 1.0, 256)))


def direct(style: str) -> StandardRAG:
    """Returns direct answering: the language model without passages."""
    return StandardRAG(style, top_k=0)
