"""MAPGRPO: one role at a time learns from groups of its decisions, with an expert among them.

OPERA, algorithm 1 and eq. 2 and 11. At a decision of the role in training G actions are tried; one
of them is the best of a pool that was scored before. What an action earns is compared with the mean
of its group, and with nothing else.

The paper has the expert in every group and trains it like any other action. Its published notes
have it in the planner's groups only and now and then, in place of the worst sample and without a
gradient. Both are `Injection`s. "Now and then" is a share of the questions here, since what a state
tries may not depend on the step of the run.

Each agent of the paper learns from states that the trained agents before it lead to, and not from
an oracle's. So the rollout continues with the first action that the policy sampled, as it would
without an expert. Only where all actions of a group are carried out is the expert's one of them.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, Forced
from jax_ragrl.rollout.tree import Forest, decisions

# From a decision and its question to the text of an expert's action, or None.
Expert = Callable[[Generate, str], str | None]

WHEN, REPLACES = ("always", "periodic", "off"), ("extra", "worst")
CARRIED = ("sampled", "expert")


@dataclasses.dataclass(frozen=True)
class Injection:
    """When an expert's action is in a group, and for what.

    `when` is always, periodic (one question in `period`) or off, at decisions of `roles` (none
    named: of all). It `replaces` one sample from the start (`extra`: G - 1 samples and the expert)
    or the worst one in hindsight (`worst`: G samples, of which the lowest is dropped). Without
    `gradient` it only raises the mean that the others are compared with. Where the rollout
    continues with one action of the group, `carried` says which: the first `sampled` one, or the
    `expert`'s, which changes the states that later decisions are made in.
    """

    when: str = "always"
    replaces: str = "extra"
    gradient: bool = True
    period: int = 4
    roles: tuple[str, ...] = ()
    carried: str = "sampled"

    def __post_init__(self) -> None:
        named = {"when": WHEN, "replaces": REPLACES, "carried": CARRIED}
        for name, choices in named.items():
            if getattr(self, name) not in choices:
                raise UserError(
                    f"recipe.expert.{name} is {getattr(self, name)!r}: use {' or '.join(choices)}"
                )
        if self.period < 1:
            raise UserError(f"recipe.expert.period is {self.period}: it counts questions, from 1")

    def due(self, role: str, question: str) -> bool:
        """Whether the groups of a role have an expert in the rollouts of a question."""
        if self.when == "off" or (self.roles and role not in self.roles):
            return False
        return self.when == "always" or zlib.crc32(question.encode()) % self.period == 0


@dataclasses.dataclass(frozen=True)
class Groups:
    """The expander: groups at the decisions of the `trained` roles, one action elsewhere.

    Every action of a role in `whole` is carried out, since its reward needs that; of the others'
    only the first one that was sampled, or the expert's (`Injection.carried`), and the searches of
    all actions of roles in `peeked` are made.
    """

    trained: frozenset[str]
    size: int
    injection: Injection
    expert: Expert | None = None
    whole: frozenset[str] = frozenset()
    peeked: frozenset[str] = frozenset()

    def __call__(self, effect: Generate, question: str) -> Branching:
        if effect.role not in self.trained:
            return Branching(1)
        text = None
        if self.expert is not None and self.injection.due(effect.role, question):
            text = self.expert(effect, question)
        forced = () if text is None else (Forced(text),)
        samples = self.size - (len(forced) if self.injection.replaces == "extra" else 0)
        follow = None if effect.role in self.whole else 1
        skip = len(forced) if self.injection.carried == "sampled" else 0
        return Branching(samples, forced, follow, effect.role in self.peeked, skip)


def siblings_mean(
    forest: Forest, reward_N: np.ndarray, injection: Injection, *, normalised: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Each action's reward against the mean of its group, and whether to train it, float32 `[N]`.

      A(x, y_i) = r(x, y_i) - 1/G sum_j r(x, y_j)                               (eq. 2, no division)

    Identical actions are one node, which counts as often as it was written: in the mean, and in
    eq. 3's sum, so its credit is `A` times that. (A loss that is linear or clipped in `A` is then
    the sum over all that was written; what the aggregate divides by, and a KL in the loss, see the
    node once.) An action without siblings has weight 0: there is nothing to learn from it, and it
    is of a role that is not in training. So has a dropped sample, and an expert without gradient
    unless the policy wrote the same. Every other weight is 1. `normalised` divides by the unbiased
    deviation of the group plus 1e-6, as GRPO does.
    """
    credit_N = np.zeros(len(forest.records), np.float32)
    weight_N = np.zeros(len(forest.records), np.float32)
    for nodes in decisions(forest):
        forced_K, reward_K = forest.forced_N[nodes], reward_N[nodes].astype(np.float64)
        count_K = forest.multiplicity_N[nodes].astype(np.float64)
        sampled_K = count_K - forced_K
        if injection.replaces == "worst" and forced_K.any() and sampled_K.any():
            worst = int(np.argmin(np.where(sampled_K > 0, reward_K, np.inf)))
            count_K[worst] -= 1
        if count_K.sum() > 1:
            trained_K = count_K - (0 if injection.gradient else forced_K)
            centred_K = reward_K - np.average(reward_K, weights=count_K)
            variance = np.sum(count_K * centred_K**2) / (count_K.sum() - 1)
            scale = np.sqrt(variance) + 1e-6 if normalised else 1.0
            credit_N[nodes] = trained_K * centred_K / scale
            weight_N[nodes] = trained_K > 0
    return credit_N, weight_N
