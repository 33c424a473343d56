"""Parts of baselines: a base class without trained roles, and the requests that they share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

from jax_ragrl.rollout.effects import CallLLM, Done
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import Fault, Steps, Used
from jax_ragrl.text.prompts import format_passages, template, user_turn
from jax_ragrl.types import LLMRequest, Message, Passage, Question, Sampling

# Tables are greedy; 256 tokens suffice for an answer or a list of queries.
GREEDY = Sampling(0.0, 1.0, 256)
MAX_QUERY_WORDS = 100


@dataclasses.dataclass(frozen=True)
class ScriptedSystem(abc.ABC):
    """A system without trained roles, unless a subclass defines them.

    Fields:
      style: the name of the prompts.
      top_k: the number of passages per search.
    """

    style: str = "baselines"
    top_k: int = 5

    @property
    def roles(self) -> Mapping[str, Role]:
        """The trained roles; none."""
        return {}

    @abc.abstractmethod
    def steps(self, question: Question) -> Steps:
        """Yields the effects of a question, see `System`."""


def ask(style: str, name: str, **values: str) -> CallLLM:
    """Returns a greedy request to the frozen language model with one user turn.

    Args:
      style: the prompt style.
      name: the name of the prompt, which is also the purpose of the request.
      values: the values of the placeholders in the prompt.
    """
    return ask_messages(name, user_turn(style, name, **values))


def ask_messages(purpose: str, messages: Sequence[Message]) -> CallLLM:
    """Returns a greedy request to the frozen language model with a conversation."""
    return CallLLM(LLMRequest(purpose, tuple(messages), GREEDY))


def report_fault(reply: ParsedAction) -> Steps:
    """Returns a parsed reply as it is; yields a `Fault` first if the reply is malformed."""
    if not reply.valid:
        yield Fault(reply.error)
    return reply


def user_message(style: str, name: str, **values: str) -> Message:
    """Returns a later user turn of a conversation.

    Args:
      style: the prompt style.
      name: the name of the prompt.
      values: the values of the placeholders in the prompt.
    """
    return Message("user", template(style, name).substitute(values))


def answer(style: str, question: Question, documents: Sequence[Passage]) -> Steps:
    """Asks the frozen language model for the answer and returns its reply.

    Args:
      style: the prompt style.
      question: the question.
      documents: the passages in the prompt; if empty, the prompt for answers from memory is used.
    """
    name = "answer" if documents else "answer_direct"
    values = {"question": question.text, "documents": format_passages(style, documents)}
    return (yield ask(style, name, **values))


def finish(style: str, question: Question, documents: Sequence[Passage]) -> Steps:
    """Asks for the answer as `answer` does, with the same arguments, and ends the rollout.

    Args:
      style: the prompt style.
      question: the question.
      documents: the passages in the prompt.
    """
    yield Used(tuple(documents))
    text = yield from answer(style, question, documents)
    yield Done(text, "answered")


def unique_passages(*groups: Sequence[Passage]) -> tuple[Passage, ...]:
    """Returns all passages of the groups in order, without duplicates."""
    return tuple(dict.fromkeys(p for passages in groups for p in passages))


def clean_query(text: str) -> str:
    """Returns a search query on one line, of at most 100 words."""
    return " ".join(text.split()[:MAX_QUERY_WORDS])
