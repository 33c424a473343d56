"""OPERA: plan, analysis-answer and rewrite agents, trained in stages by MAPGRPO."""

from jax_ragrl.systems.opera.mapgrpo import Groups, Injection
from jax_ragrl.systems.opera.recipe import Settings, recipe, table_system
from jax_ragrl.systems.opera.system import ROLES, Opera

__all__ = [
    "ROLES",
    "Groups",
    "Injection",
    "Opera",
    "Settings",
    "recipe",
    "table_system",
]
