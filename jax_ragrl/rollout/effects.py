"""What a state of a system may wait for. `rollout/collect.py` is the only code that performs it."""

from __future__ import annotations

from typing import NamedTuple

from jax_ragrl.types import LLMRequest, Message


class Said(NamedTuple):
    """An earlier action of a context, as the ids that were sampled (`Parsed.ids`)."""

    ids: tuple[int, ...]


class Told(NamedTuple):
    """What a context was shown after an action: passages, a result, an error. Never trained."""

    text: str


Segment = Said | Told


class Generate(NamedTuple):
    """One action of a role. `depth` counts the node kinds above it, the root being 1.

    `after` continues the conversation that `messages` began: earlier actions and what they were
    told, in turn. A context is append-only; its ids are never decoded and encoded again.
    """

    role: str
    messages: tuple[Message, ...]
    depth: int = 1
    after: tuple[Segment, ...] = ()


class Search(NamedTuple):
    """The passages ranked `k * page` to `k * page + k - 1` for a query.

    `turn` is the action that pays, counted from the branch's first; -1: its latest.
    """

    query: str
    k: int
    page: int = 0
    turn: int = -1


class Ask(NamedTuple):
    """A reply of the frozen language model; several `samples` branch the state.

    `turn` is the action that pays, as for `Search`.
    """

    request: LLMRequest
    samples: int = 1
    turn: int = -1


class Done(NamedTuple):
    """A leaf. `answer` is None for a dead one, and `why` says what ended it."""

    answer: str | None
    why: str = ""


Effect = Generate | Search | Ask | Done
