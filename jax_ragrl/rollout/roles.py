"""A role: a name, whose parameters it uses, how it is sampled, and its grammar."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax_ragrl.types import Sampling


class Parsed(NamedTuple):
    """A parsed action. `valid` is False for malformed text, and `error` then names the fault."""

    action: str
    args: tuple[Any, ...] = ()
    thought: str = ""
    valid: bool = True
    error: str = ""


def malformed(error: str) -> Parsed:
    """The parse of text that is not an action."""
    return Parsed("", valid=False, error=error)


@dataclasses.dataclass(frozen=True)
class Role:
    """`parse` is total: it returns `malformed(...)` and never raises, whatever the text."""

    name: str
    parse: Callable[[str], Parsed]
    sampling: Sampling = Sampling()
    policy: str = "policy"
