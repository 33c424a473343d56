"""One paper's choice on another's system, by config alone.

`credit` and `rollouts` put one paper's credit on another's rollouts; `policies` that name roles
give these parameters of their own, as OPERA's have, where a paper shares them among all.

Every credit counts what actions earn themselves: penalties, costs and role rewards. `shared` and
`earned` give each action its own reward, `reachable_leaves` and `siblings` also those of the later
actions on the way to a leaf, and `rollouts` those of the whole rollout.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out
from jax_ragrl.credit.assign import earned, over_rollouts, over_siblings, reachable_leaves, shared
from jax_ragrl.rollout.roles import Role
from jax_ragrl.systems.base import Credit, Recipe, Wrapped, two_or_more

OWN = "own"
# What an action is worth, for an objective with a critic.
WORTH: Mapping[str, Credit] = {
    "reachable_leaves": reachable_leaves,
    "shared": shared,
    "earned": earned,
}
# What an action is compared with, by the rule that `objective.advantage` names, without a critic.
COMPARED: Mapping[str, Callable[..., Any]] = {
    "rollouts": over_rollouts,
    "siblings": over_siblings,
}


def crossed(recipe: Recipe, credit: str, rollouts: int) -> Recipe:
    """A recipe with another credit, or another number of rollouts a question.

    Args:
      credit: `own` keeps the recipe's; else a name in `WORTH` or `COMPARED`.
      rollouts: whole copies of every question's rollout; 0 keeps the recipe's.

    Raises `UserError` for an unknown name, or where nothing would be compared.
    """
    recipe = dataclasses.replace(recipe, rollouts=rollouts or recipe.rollouts)
    if credit == OWN:
        return recipe
    if credit in WORTH:
        turns = earned if credit == "earned" else None
        return dataclasses.replace(recipe, credit=WORTH[credit], advantages={}, turns=turns)
    one_of("config.credit", credit, (OWN, *WORTH, *COMPARED))
    size = "width" if credit == "siblings" else "rollouts"
    two_or_more(size, getattr(recipe, size))
    advantages = {
        rule.__name__: functools.partial(COMPARED[credit], rule=rule)
        for rule in (group_centred, group_normalised, leave_one_out)
    }
    return dataclasses.replace(recipe, advantages=advantages, turns=None)


@dataclasses.dataclass(frozen=True)
class Apart(Wrapped):
    """A system some of whose roles have a policy of their own, of the role's name."""

    own: frozenset[str]

    @property
    def roles(self) -> Mapping[str, Role]:
        """The system's, those of their own with another policy."""
        return {
            name: dataclasses.replace(role, policy=name) if name in self.own else role
            for name, role in self.system.roles.items()
        }


def with_own_policies(recipe: Recipe, names: Collection[str]) -> Recipe:
    """A recipe in which the roles among `names` have policies of their own."""
    own = frozenset(names) & recipe.system.roles.keys()
    if not own:
        return recipe
    inference = Apart(recipe.inference, own) if recipe.inference else None
    return dataclasses.replace(recipe, system=Apart(recipe.system, own), inference=inference)
