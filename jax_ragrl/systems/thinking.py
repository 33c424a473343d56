"""Roles that think: their actions may begin with a think block (`thinking` in a config)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_ragrl.rollout.roles import Role
from jax_ragrl.systems.base import Recipe, WrappedSystem


@dataclasses.dataclass(frozen=True)
class ThinkingRoles(WrappedSystem):
    """A system whose roles think, except those whose grammar mask excludes a think block."""

    @property
    def roles(self) -> Mapping[str, Role]:
        """The roles of the inner system, with `thinking` set."""
        return {
            name: dataclasses.replace(role, thinking=not role.allowed_token_regex)
            for name, role in self.system.roles.items()
        }


def with_thinking(recipe: Recipe) -> Recipe:
    """Returns the recipe with roles that think, in training and in evaluation."""
    return recipe.with_systems(ThinkingRoles)
