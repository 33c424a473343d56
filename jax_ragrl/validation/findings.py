"""Findings: one line each, with the remedy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, ParamSpec

from jax_ragrl.errors import EffectError, UserError

P = ParamSpec("P")
Level = Literal["error", "warning", "ok"]


class Finding(NamedTuple):
    """One result of a check.

    Fields:
      level: `error` (a run would fail), `warning` (it would run, but perhaps not as meant), `ok`.
      topic: the part of the set-up: `config`, `data`, `gold`, `index`, `policy`, ...
      text: one line; an error or a warning says how to mend it.
    """

    level: Level
    topic: str
    text: str

    def line(self) -> str:
        """The finding as a line of a terminal."""
        return f"{self.level:7}  {self.topic}: {self.text}"


def guarded(topic: str) -> Callable[
    [Callable[P, Iterable[Finding]]], Callable[P, Iterator[Finding]]
]:  # fmt: skip
    """Returns a decorator of a check: an error that a user can mend becomes its last finding."""

    def decorate(check: Callable[P, Iterable[Finding]]) -> Callable[P, Iterator[Finding]]:
        @functools.wraps(check)
        def run(*args: P.args, **kwargs: P.kwargs) -> Iterator[Finding]:
            try:
                yield from check(*args, **kwargs)
            except (UserError, EffectError) as error:
                yield Finding("error", topic, str(error))
            except OSError as error:
                yield Finding("error", topic, f"{error}: give a path that can be read")

        return run

    return decorate
