"""Expanders: which actions, and how many, are tried in a state that waits for an action.

An expander is a function from a `Generate` effect and the text of its question to a `Branching`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax_ragrl.rollout.effects import Generate


class ForcedAction(NamedTuple):
    """A text that the action begins with, or, if `complete`, the whole action."""

    text: str
    complete: bool = True


class Branching(NamedTuple):
    """The actions that are tried in one state: forced actions first, then samples.

    Fields:
      samples, forced_actions: the number of sampled actions, and the texts before them.
      follow: the number of distinct actions that the rollout continues with; None: all.
      peek: whether the searches of the other actions are still made, without continuing after
        them: the passages that a query returns may be its reward.
      skip: the number of first actions that the rollout does not continue with.
    """

    samples: int
    forced_actions: tuple[ForcedAction, ...] = ()
    follow: int | None = None
    peek: bool = False
    skip: int = 0


# From an effect and the text of its question.
Expander = Callable[[Generate, str], Branching]


class Growth(NamedTuple):
    """Further actions in decisions of rollouts that have ended, each with a rollout after it.

    The trees of Tree-GRPO (Ji et al. 2025, section 3.2). Decisions are chosen when all rollouts of
    the batch have ended, so that the choice may depend on all that happened in them.

    Fields:
      rounds: how many times each tree grows.
      actions: the actions that a tree gets in a round.
      weigh: from the `tree.Record` of the actions that were tried in each decision of a tree to the
        chances of the decisions, which are drawn with replacement; None: they are equal. Unless
        the chances are independent of the actions given their states, the gradient is biased.
    """

    rounds: int
    actions: int
    weigh: Callable[[Sequence[Sequence[Any]]], Sequence[float]] | None = None


def single_chain(effect: Generate, question: str) -> Branching:
    """Samples one action in every state, so that the rollout does not branch."""
    del effect, question
    return Branching(1)


@dataclasses.dataclass(frozen=True)
class Tree:
    """The tree of C-3PO (Chen et al. 2025, section 5.1): forced actions, then K(t) samples.

    Fields:
      width: the number of samples per state down to the depth `branching_depth`; 1 below it.
      branching_depth: the last depth at which the tree branches.
      forced_actions: from a role to the texts that are tried instead of `width` samples;
        `$question` in a text stands for the question.
      free_samples: the number of samples in addition to forced actions.
    """

    width: int = 2
    branching_depth: int = 4
    forced_actions: Mapping[str, tuple[ForcedAction, ...]] = dataclasses.field(default_factory=dict)
    free_samples: int = 0

    def __call__(self, effect: Generate, question: str) -> Branching:
        if templates := self.forced_actions.get(effect.role, ()):
            # Filled in once, so that a `$question` inside the question stays as it is.
            texts = (f._replace(text=f.text.replace("$question", question)) for f in templates)
            return Branching(self.free_samples, tuple(texts))
        return Branching(self.width if effect.depth <= self.branching_depth else 1)
