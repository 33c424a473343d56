"""Parts of baselines: a base class without trained roles, and the requests that they share."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jax_ragrl.rollout.effects import CallLLM, Done
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Fault, Steps, Used
from jax_ragrl.text.prompts import fill, question_turn
from jax_ragrl.types import LLMRequest, Message, Passage, Question, Sampling

# Tables are greedy; 256 tokens suffice for an answer or a list of queries.
GREEDY = Sampling(0.0, 1.0, 256)
MAX_QUERY_WORDS = 100


@dataclasses.dataclass(frozen=True)
class ScriptedSystem(abc.ABC):
    """A system without trained roles, unless a subclass defines them."""

    style: str = "baselines"
    top_k: int = 5

    @property
    def roles(self) -> Mapping[str, Role]:
        return {}

    @abc.abstractmethod
    def steps(self, question: Question) -> Steps:
        """Yields the effects of a question, see `System`."""

    def ask(
        self, name: str, question: Question, documents: Sequence[Passage] = (), **values: str
    ) -> CallLLM:
        """Returns a greedy request to the frozen model; `name` is its prompt and its purpose."""
        prompt = question_turn(self.style, name, question, documents, first=1, **values)
        return CallLLM(LLMRequest(name, prompt, GREEDY))

    def message(self, name: str, **values: str) -> Message:
        """Returns a later user turn of a conversation, from the prompt `name`."""
        return Message("user", fill(self.style, name, **values))

    def answer(self, question: Question, documents: Sequence[Passage]) -> CallLLM:
        """Returns the request for the answer; without documents it is given from memory."""
        return self.ask("answer" if documents else "answer_direct", question, documents)

    def finish(self, question: Question, documents: Sequence[Passage]) -> Steps:
        """Asks for the answer, and ends the rollout."""
        yield Used(tuple(documents))
        text = yield self.answer(question, documents)
        yield Done(text, "answered")


def letter_role(name: str, letters: str, fault: str) -> Role:
    """Returns a role of one greedy token, one of some `letters`; any other is a `fault`."""
    parse = functools.partial(parse_letter, letters=letters, fault=fault)
    mask, sampling = f"[{letters}]", Sampling(0.0, 1.0, 1)
    return Role(name, parse, sampling, allowed_token_regex=mask, action_regex=mask)


def parse_letter(text: str, letters: str, fault: str) -> ParsedAction:
    """Parses exactly one of some letters."""
    letter = text.strip()
    is_valid = len(letter) == 1 and letter in letters
    return ParsedAction(letter) if is_valid else invalid_action(fault)


def report_fault(reply: ParsedAction) -> Steps:
    """Returns a parsed reply as it is; yields a `Fault` first if the reply is malformed."""
    if not reply.valid:
        yield Fault(reply.error)
    return reply


def unique_passages(*groups: Sequence[Passage]) -> tuple[Passage, ...]:
    """Returns all passages of the groups in order, without duplicates."""
    return tuple(dict.fromkeys(p for passages in groups for p in passages))


def clean_query(text: str) -> str:
    """Returns a search query on one line, of at most 100 words."""
    return " ".join(text.split()[:MAX_QUERY_WORDS])
