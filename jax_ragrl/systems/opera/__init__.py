"""OPERA: plan, analysis-answer and rewrite agents, trained in stages by MAPGRPO."""

from jax_ragrl.systems.opera.system import Opera, Settings, recipe

__all__ = ["Opera", "Settings", "recipe"]
