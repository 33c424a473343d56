"""Expanders: which actions, and how many, are tried where a state waits for one.

An expander is a plain function from a `Generate` effect and its question to a `Branching`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jax_ragrl.rollout.effects import Generate


class Forced(NamedTuple):
    """A text the policy is made to begin with; `complete` texts are not continued."""

    text: str
    complete: bool = True


class Branching(NamedTuple):
    """How many actions to sample, and which to force besides.

    Forced actions come first. The rollout continues with `follow` distinct actions, the first ones
    after `skip` actions; with None, with all. With `peek` a search that one of the others asks for
    is made all the same, and nothing after it: what a query finds may be its reward.
    """

    samples: int
    forced: tuple[Forced, ...] = ()
    follow: int | None = None
    peek: bool = False
    skip: int = 0


class Expander(Protocol):
    def __call__(self, effect: Generate, question: str) -> Branching: ...


def once(effect: Generate, question: str) -> Branching:
    """One sampled action everywhere: a single chain."""
    del effect, question
    return Branching(1)


@dataclasses.dataclass(frozen=True)
class Tree:
    """C-3PO's tree (section 5.1): forced actions at some roles, then K(t) samples.

    `width` samples are drawn down to depth `until`, one below. `forced` maps a role to the texts
    it is made to write instead, beside `free` samples of its own; `$question` in them stands for
    the question.
    """

    width: int = 2
    until: int = 4
    forced: Mapping[str, tuple[Forced, ...]] = dataclasses.field(default_factory=dict)
    free: int = 0

    def __call__(self, effect: Generate, question: str) -> Branching:
        texts = self.forced.get(effect.role, ())
        if texts:
            fill = (f._replace(text=f.text.replace("$question", question)) for f in texts)
            return Branching(self.free, tuple(fill))
        return Branching(self.width if effect.depth <= self.until else 1)
