"""Effects that a state of a system may wait for. Only `rollout/collect.py` performs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jax_ragrl.types import LLMRequest, Message


class ModelOutput(NamedTuple):
    """An earlier action in a context, as the token ids that were sampled (`ParsedAction.ids`)."""

    ids: tuple[int, ...]


class Observation(NamedTuple):
    """Text that the environment appends after an action: passages, a result, an error.

    The tokens of an observation are never trained.
    """

    text: str


Segment = ModelOutput | Observation


class Generate(NamedTuple):
    """One action of a role.

    Fields:
      messages: the prompt, which begins the conversation.
      depth: the number of decision levels down to this action; 1 at the root.
      history: earlier actions and the observations after them, in order. A context only grows; its
        ids are never decoded and encoded again.
    """

    role: str
    messages: tuple[Message, ...]
    depth: int = 1
    history: tuple[Segment, ...] = ()


class Search(NamedTuple):
    """A search for the passages ranked `k * page` to `k * page + k - 1` for a query.

    `turn` is the action that pays for the search, as an index into the actions of the branch; -1 is
    the latest action.
    """

    query: str
    k: int
    page: int = 0
    turn: int = -1


class CallLLM(NamedTuple):
    """A call to the frozen language model; `turn` is the action that pays, as in `Search`."""

    request: LLMRequest
    turn: int = -1


class CallTool(NamedTuple):
    """A call of a tool of `Environment.tools`, with JSON arguments by name; `turn` as in `Search`.

    The reply is a `ToolResult`.
    """

    tool: str
    arguments: Mapping[str, Any]
    turn: int = -1


class Done(NamedTuple):
    """The end of a rollout: its answer or None, why it ended, and the depth of decision levels."""

    answer: str | None
    finish_reason: str = ""
    depth: int = 0


Effect = Generate | Search | CallLLM | CallTool | Done
