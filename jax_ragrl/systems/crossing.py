"""One paper's credit on another's rollouts, by config alone: `credit` and `rollouts`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out
from jax_ragrl.credit.assign import earned, over_rollouts, over_siblings, reachable_leaves, shared
from jax_ragrl.errors import UserError
from jax_ragrl.systems.base import RETURNS, Recipe

OWN = "own"
# What an action is worth, for an objective with a critic.
WORTH: Mapping[str, Callable[..., Any]] = {
    "reachable_leaves": reachable_leaves,
    "shared": shared,
    "earned": earned,
}
# What an action is compared with, by the rule that `objective.advantage` names, without a critic.
COMPARED: Mapping[str, Callable[..., Any]] = {
    "rollouts": over_rollouts,
    "siblings": over_siblings,
}
RULES: Mapping[str, Callable[..., Any]] = {
    "group_centred": group_centred,
    "group_normalised": group_normalised,
    "leave_one_out": leave_one_out,
}


def crossed(recipe: Recipe, credit: str, rollouts: int, advantage: str) -> Recipe:
    """A recipe with another credit, or another number of rollouts a question.

    Args:
      credit: `own` keeps the recipe's; else a name in `WORTH` or `COMPARED`.
      rollouts: whole copies of every question's rollout; 0 keeps the recipe's.
      advantage: of the objective: the rule of a credit that compares.

    Raises:
      UserError: an unknown name, or groups of one.
    """
    recipe = dataclasses.replace(recipe, rollouts=rollouts or recipe.rollouts)
    if credit == OWN:
        return recipe
    if credit in WORTH:
        return dataclasses.replace(recipe, credit=WORTH[credit], gives=RETURNS)
    if credit not in COMPARED:
        raise UserError(
            f"config.credit is {credit!r}: use one of {', '.join((OWN, *WORTH, *COMPARED))}"
        )
    if advantage not in RULES:
        raise UserError(
            f"config.credit {credit} compares actions, but objective.advantage is {advantage!r}: "
            f"use one of {', '.join(RULES)}, and critic none"
        )
    if credit == "rollouts" and recipe.rollouts < 2:
        raise UserError(
            "config.credit rollouts compares the rollouts of a question, of which there is one: "
            "give config.rollouts=8, or another number of them"
        )
    rule = functools.partial(COMPARED[credit], rule=RULES[advantage])
    return dataclasses.replace(recipe, credit=rule, gives=advantage)
