"""The objective of a run as a table of choices: what is minimised, and nothing of how.

Every field is one of the places where the papers differ; `step.py` and `targets.py` read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jax_ragrl.config.schema import one_of
from jax_ragrl.errors import UserError

RATIOS = ("clip", "dual_clip", "none")
CRITICS = ("own", "shared", "none")
VALUE_LOSSES = ("clipped", "plain")
ESTIMATED = ("gae", "whitened_gae")
SPANS = ("turn", "conversation")
GROUPED = ("group_normalised", "group_centred", "leave_one_out", "tree_group")
PLACES = ("none", "reward", "terminal", "loss")
ESTIMATORS = ("k1", "k2", "k3")
AGGREGATIONS = ("token_mean", "sequence_mean", "role_sum")


@dataclasses.dataclass(frozen=True)
class KL:
    """What distance from the reference costs.

    `where` is `reward` (every token pays its own), `terminal` (the last token pays for all),
    `loss`, or `none`: then there is no reference. The coefficient is fixed where `target` is 0, and
    otherwise steered so that an action's KL meets `target`, never below `floor`.
    """

    where: str = "reward"
    estimator: str = "k1"
    coefficient: float = 0.005
    target: float = 0.0
    horizon: float = 10000.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        one_of("objective.kl.where", self.where, PLACES)
        one_of("objective.kl.estimator", self.estimator, ESTIMATORS)
        if (self.where, self.estimator) == ("loss", "k1"):
            raise UserError(
                "kl.estimator is 'k1' in the loss, where its mean gradient is zero and it pulls "
                "nowhere: use k2 or k3, or kl.where='reward'"
            )


@dataclasses.dataclass(frozen=True)
class Objective:
    """What an update minimises.

    Fields:
      ratio: `clip` (PPO), `dual_clip` (bounded by `dual` for bad tokens too), or `none`: the plain
        policy gradient, right for one step on fresh samples only.
      stale_cap: truncates the importance weights of rollouts that an older policy sampled; 0 counts
        every token fully.
      critic: a model of its `own`, a head on the policy's trunk (`shared`, its loss weighing
        `value_coefficient`), or `none`.
      advantage: `gae` or `whitened_gae`, where a node's number is a reward that the critic spreads
        over its tokens; or the group rule that makes the numbers (one of the recipe's, see
        `systems.base.Recipe`), which then are the advantages of all of a node's tokens.
      span: what GAE runs over: a `turn`, whose number is all that it will ever earn, or the
        `conversation` of turns that continue each other, whose numbers are what each earned itself
        (`credit.assign.earned`); what is observed between turns is passed over.
      entropy: what a nat of entropy is worth.
      aggregation: over all tokens, over each action's mean, or each role's token mean summed with
        `role_weights` (pairs of role and weight; a role that is not named weighs 1). The loss of a
        critic of its own is always a token mean.
    """

    ratio: str = "clip"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual: float = 3.0
    stale_cap: float = 0.0
    critic: str = "own"
    value_loss: str = "clipped"
    value_clip: float = 0.2
    value_coefficient: float = 0.1
    advantage: str = "whitened_gae"
    span: str = "turn"
    gamma: float = 1.0
    lam: float = 0.95
    kl: KL = KL()
    entropy: float = 0.0
    aggregation: str = "token_mean"
    role_weights: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        one_of("objective.ratio", self.ratio, RATIOS)
        one_of("objective.critic", self.critic, CRITICS)
        one_of("objective.value_loss", self.value_loss, VALUE_LOSSES)
        one_of("objective.advantage", self.advantage, ESTIMATED + GROUPED)
        one_of("objective.span", self.span, SPANS)
        one_of("objective.aggregation", self.aggregation, AGGREGATIONS)
        if (self.advantage in ESTIMATED) != (self.critic != "none"):
            wanted = GROUPED if self.critic == "none" else ESTIMATED
            raise UserError(
                f"objective.advantage is {self.advantage!r} with critic {self.critic!r}: a critic "
                f"is for {' or '.join(ESTIMATED)}; with this one use {' or '.join(wanted)}"
            )
        if self.role_weights and self.aggregation != "role_sum":
            raise UserError(
                "objective.role_weights weigh the roles of aggregation 'role_sum', but this is "
                f"{self.aggregation!r}, which knows no roles: choose role_sum, or leave them out"
            )
        if self.span == "conversation" and self.critic == "none":
            raise UserError(
                "objective.span is 'conversation' without a critic, whose values GAE carries from "
                "turn to turn: use a critic, or span 'turn'"
            )

    def weights_of(self, roles: Sequence[str]) -> tuple[float, ...]:
        """The weight of each role; `UserError` for a weight of a role that is not there."""
        named = dict(self.role_weights)
        for role in named:
            one_of("objective.role_weights", role, roles)
        return tuple(named.get(role, 1.0) for role in roles)
