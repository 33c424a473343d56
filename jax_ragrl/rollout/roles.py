"""A role: a name, whose parameters it uses, how it is sampled, and its grammar."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_ragrl.types import Sampling


class Parsed(NamedTuple):
    """A parsed action. `valid` is False for malformed text, and `error` then names the fault.

    `format_score` grades the form, 0 to 1. `text` and `ids` are the action as it was sampled,
    filled in by the rollout: penalties read the raw text, contexts carry the ids on.
    """

    action: str
    args: tuple[Any, ...] = ()
    thought: str = ""
    valid: bool = True
    error: str = ""
    format_score: float = 1.0
    text: str = ""
    ids: tuple[int, ...] = ()


def malformed(error: str) -> Parsed:
    """The parse of text that is not an action."""
    return Parsed("", valid=False, error=error, format_score=0.0)


@dataclasses.dataclass(frozen=True)
class Role:
    """How a role acts.

    `parse` is total: it returns `malformed(...)` and never raises, whatever the text. `policy`
    names the parameters. An action ends with the model's stop token, or sooner: with the shortest
    ids whose text holds one of `stops`. `chat` tells observations as user turns of the chat
    template; otherwise they are appended as plain text. `tokens`, where given, is a regular
    expression: only tokens whose text matches it, and stop tokens, may be written (a grammar mask,
    in sampling and in scoring alike).
    """

    name: str
    parse: Callable[[str], Parsed]
    sampling: Sampling = Sampling()
    policy: str = "policy"
    stops: tuple[str, ...] = ()
    chat: bool = True
    tokens: str = ""
