"""MAPGRPO: one role at a time learns from groups of its decisions, which contain an expert action.

OPERA, algorithm 1 and equations 2 and 11. At each decision of the role in training, G actions are
tried; one of them is the best action of a pool that was scored before training. The reward of an
action is compared with the mean of its group only.

In the paper every group contains the expert's action, which is trained like any other. In the
published notes only the planner's groups contain it, in some steps, in place of the worst sample
and without a gradient. Both are an `Injection`; "some steps" is a share of the questions, since the
actions tried in a state must not depend on the step.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable

import numpy as np

from jax_ragrl.config.ranges import Count
from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import Rule, compare_draws, over_rollouts
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, ForcedAction
from jax_ragrl.rollout.tree import Forest, sibling_groups

# From a decision and its question to the text of an expert's action, or None.
Expert = Callable[[Generate, str], str | None]


@dataclasses.dataclass(frozen=True)
class Injection:
    """When a group contains an expert's action, and which sample it replaces.

    Fields:
      when: `always`, `periodic` (one question in `period`) or `off`.
      replaces: `extra`: one sample fewer is drawn, G - 1 samples and the expert. `worst`: G samples
        are drawn, and the one with the lowest reward is dropped.
      gradient: whether the expert's action is trained; if not, it only shifts the group's mean.
      period: with `periodic`, the number of questions per question with an expert.
      roles: the roles whose groups contain an expert; empty for all.
      continue_with: if the rollout continues with one action of the group, the first `sampled` one
        or the `expert`'s; the latter changes the states of later decisions.
    """

    when: str = "always"
    replaces: str = "extra"
    gradient: bool = True
    period: Count = 4
    roles: tuple[str, ...] = ()
    continue_with: str = "sampled"

    def __post_init__(self) -> None:
        one_of("recipe.expert.when", self.when, ("always", "periodic", "off"))
        one_of("recipe.expert.replaces", self.replaces, ("extra", "worst"))
        one_of("recipe.expert.continue_with", self.continue_with, ("sampled", "expert"))

    def due(self, role: str, question: str) -> bool:
        """Returns whether the groups of a role contain an expert in the rollouts of a question."""
        if self.when == "off" or (self.roles and role not in self.roles):
            return False
        # A checksum, not `hash`, which differs between processes.
        return self.when == "always" or zlib.crc32(question.encode()) % self.period == 0


@dataclasses.dataclass(frozen=True)
class Groups:
    """An expander with groups at the decisions of some roles, and one action at all others.

    Fields:
      trained_roles, size: the roles with groups, and the number of actions per group.
      injection, expert: when a group contains an expert's action, and who writes it.
      continue_all: roles whose actions are all continued, since their reward needs the outcome. Of
        other roles one action is continued (`Injection.continue_with`).
      search_all: roles whose queries are all searched, also those of actions that end there.
    """

    trained_roles: frozenset[str]
    size: int
    injection: Injection
    expert: Expert | None = None
    continue_all: frozenset[str] = frozenset()
    search_all: frozenset[str] = frozenset()

    def __call__(self, effect: Generate, question: str) -> Branching:
        if effect.role not in self.trained_roles:
            return Branching(1)
        text = None
        if self.expert is not None and self.injection.due(effect.role, question):
            text = self.expert(effect, question)
        forced_actions = () if text is None else (ForcedAction(text),)
        is_extra = self.injection.replaces == "extra"
        return Branching(
            samples=self.size - (len(forced_actions) if is_extra else 0),
            forced_actions=forced_actions,
            follow=None if effect.role in self.continue_all else 1,
            peek=effect.role in self.search_all,
            # Forced actions come first in a group: skip them to continue with a sampled one.
            skip=len(forced_actions) if self.injection.continue_with == "sampled" else 0,
        )


def sibling_advantages(
    forest: Forest, reward_N: np.ndarray, injection: Injection, rule: Rule
) -> tuple[np.ndarray, np.ndarray]:
    """Returns each action's advantage in its group, and its weight, float32 `[N]`.

    By the rule of the paper, `group_centred`:

      A(x, y_i) = r(x, y_i) - 1/G sum_j r(x, y_j)                               (eq. 2, no division)

    Identical actions are one node, which counts as often as it was tried in the group and in the
    sum of eq. 3, but once in its divisor and in a KL of the loss. The weight is 0 for a role not in
    training, a dropped sample, and an expert without gradient that the policy did not sample.

    `reward_N` has the immediate reward of each node; `rule` is a group rule.
    """
    count_N = forest.multiplicity_N.copy()
    if injection.replaces == "worst":
        for nodes in sibling_groups(forest):
            sampled = [n for n in nodes if forest.multiplicity_N[n] > forest.forced_N[n]]
            if sampled and forest.forced_N[nodes].any():
                count_N[min(sampled, key=lambda n: float(reward_N[n]))] -= 1  # the expert's place
    trained_N = count_N - (0 if injection.gradient else forest.forced_N)
    return compare_draws(forest, reward_N, rule, count_N, trained_N)


def over_answers(forest: Forest, reward_N: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Returns the credit `over_rollouts` by answers alone, the GRPO that OPERA compares with."""
    # `over_rollouts` sums all rewards of a rollout, and role rewards are for MAPGRPO.
    return over_rollouts(forest, np.where(forest.leaf_N, reward_N, 0), rule)
