"""What a state of a system may wait for. `rollout/collect.py` is the only code that performs it."""

from __future__ import annotations

from typing import NamedTuple

from jax_ragrl.types import LLMRequest, Message


class Generate(NamedTuple):
    """One action of a role. `depth` counts the node kinds above it, the root being 1."""

    role: str
    messages: tuple[Message, ...]
    depth: int


class Search(NamedTuple):
    """The passages ranked `k * page` to `k * page + k - 1` for a query."""

    query: str
    k: int
    page: int = 0


class Ask(NamedTuple):
    """A reply of the frozen language model; several `samples` branch the state."""

    request: LLMRequest
    samples: int = 1


class Done(NamedTuple):
    """A leaf. `answer` is None for a dead one, and `why` says what ended it."""

    answer: str | None
    why: str = ""


Effect = Generate | Search | Ask | Done
