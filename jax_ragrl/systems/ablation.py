r"""Choices by config for any system: the credit rule, the policies, and how strict grammars are.

`credit` and `rollouts` combine the credit of one paper with the rollouts of another. Each role that
`policies` names gets its own parameters, as in OPERA. With `grammar` set to `strict`, an action has
to match `Role.action_regex`, in sampling and in scoring; with `loose`, a malformed one is punished
or corrected as in the paper.

Every credit includes the immediate rewards of actions (penalties, costs, role rewards). `shared`,
`roles` and `earned` give each action its own; `reachable_leaves`, `child_mean` and `siblings` add
those of later actions on the way to a leaf; `rollouts` adds all rewards of the rollout.

C-3PO with GRPO among the actions of a decision, for example:
    --config.credit=siblings --config.objective.critic=none \
    --config.objective.advantage=group_normalised --config.objective.kl.where=loss \
    --config.objective.kl.estimator=k3
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection
from typing import Any

from jax_ragrl.config.functions import imported
from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import GROUP_CREDITS, RETURN_CREDITS
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.roles import Role
from jax_ragrl.systems.base import Recipe, check_group_size, with_roles

OWN = "own"
LOOSE, STRICT = "loose", "strict"


def own_credit(where: str, text: str) -> Any:
    """Returns the credit `module:function`; `UserError`, which names `where`, if it is none."""
    own = imported(where, text)
    try:
        signature = inspect.signature(own)
        signature.bind(None, None, **{"rule": None} if "rule" in signature.parameters else {})
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{where} is {text!r}, which cannot be called ({error}): its parameters "
            "are forest and reward_N, and rule if it compares the actions of a group"
        ) from error
    return own


def with_credit(recipe: Recipe, credit: str, rollouts: int) -> Recipe:
    """Returns the recipe with another credit rule or another number of rollouts per question.

    `credit` is `own` (that of the recipe), a key of `RETURN_CREDITS` or `GROUP_CREDITS`, or
    `module:function` of one's own: a `GroupCredit` if it has a parameter `rule`, otherwise a
    `Credit`. With 0 `rollouts` the recipe keeps its number.

    Raises:
      UserError: the name is unknown, the groups to compare would have one member, or only one
        action of each group has the leaves to compare.
    """
    recipe = dataclasses.replace(recipe, rollouts=rollouts or recipe.rollouts)
    if credit == OWN:
        return recipe
    if ":" in credit:
        own = own_credit("config.credit", credit)
        kind = "compare" if "rule" in inspect.signature(own).parameters else "credit"
        none = {"credit": None, "compare": None, "turn_credit": None}
        return dataclasses.replace(recipe, **none | {kind: own}, reads_leaves=True)
    if credit in RETURN_CREDITS:
        # GAE over a conversation sums rewards itself: it needs the reward of each turn alone.
        turn_credit = recipe.turn_credit if credit == "earned" else None
        return dataclasses.replace(
            recipe,
            credit=RETURN_CREDITS[credit],
            compare=None,
            turn_credit=turn_credit,
            reads_leaves=True,
        )
    one_of("config.credit", credit, (OWN, *RETURN_CREDITS, *GROUP_CREDITS))
    # Siblings are the actions that are tried in one state; whole rollouts are copies.
    if credit == "siblings" and not recipe.reads_leaves:
        raise UserError(
            "config.credit 'siblings' compares actions by the leaves that follow each, but the "
            "rollouts of this recipe continue after one action of a group: use 'own', or whole "
            "rollouts (group_size 1, rollouts of 2 or more, and 'rollouts')"
        )
    if credit != "siblings":
        check_group_size("rollouts", recipe.rollouts)
    elif not recipe.growth:
        check_group_size("width", recipe.width)
    return dataclasses.replace(
        recipe, credit=None, compare=GROUP_CREDITS[credit], turn_credit=None, reads_leaves=True
    )


def with_own_policies(recipe: Recipe, names: Collection[str]) -> Recipe:
    """Returns the recipe with a separate policy, of its own name, for each role in `names`.

    Names that are not roles of the system are ignored: they may be names of policies.
    """
    own = frozenset(names) & recipe.system.roles.keys()

    def with_own_policy(role: Role) -> Role:
        return dataclasses.replace(role, policy=role.name) if role.name in own else role

    return with_roles(recipe, with_own_policy) if own else recipe


def with_thinking(recipe: Recipe) -> Recipe:
    """Returns the recipe with roles that think, but those that may write certain tokens only."""
    return with_roles(
        recipe, lambda role: dataclasses.replace(role, thinking=not role.allowed_token_regex)
    )


def with_grammar(recipe: Recipe, grammar: str) -> Recipe:
    """Returns the recipe with strict grammars if `grammar` is `strict`.

    Raises:
      UserError: the name is unknown, a role of the system has no regular expression, or a role
        thinks although its grammar has no think tags.
    """
    one_of("config.grammar", grammar, (LOOSE, STRICT))
    if grammar == LOOSE:
        return recipe
    for system in filter(None, (recipe.system, recipe.inference)):
        for role in system.roles.values():
            if not role.action_regex:
                raise UserError(
                    f"config.grammar is 'strict', but role {role.name} of this system has no "
                    "regular expression: give its Role an action_regex, or use 'loose'"
                )
            # The mask would keep the role from writing a block, or from closing one that its
            # prompt opens.
            if role.thinking and not role.reads_thoughts:
                raise UserError(
                    f"config.grammar is 'strict' and config.thinking 'on', but the grammar of role "
                    f"{role.name} has no think tags, so that it could not think: use grammar "
                    "'loose', or thinking 'off'"
                )
    return with_roles(recipe, lambda role: dataclasses.replace(role, strict=True))
