"""The source of the expert's actions: a file of scored actions, or the rules of a corpus."""

from __future__ import annotations

import functools
import pathlib

from jax_ragrl.errors import UserError
from jax_ragrl.systems.opera.expert_pool import load_pool
from jax_ragrl.systems.opera.mapgrpo import Expert
from jax_ragrl.systems.opera.world import WorldExpert

WORLD = "world"


# Cached: an expander is built for every step, and a pool has 30,000 lines.
@functools.cache
def load_expert(when: str, pool: str, style: str) -> Expert | None:
    """Returns the expert of a run; None if `when` is `off`.

    Args:
      when: `Injection.when`.
      pool: a file of scored actions, or `world` for the rules of the synthetic corpus.
      style: the prompt style, which the rules read.

    Raises:
      UserError: an expert is needed, but `pool` is empty or not a pool.
    """
    if when == "off":
        return None
    if not pool:
        raise UserError(
            f"recipe.expert.when is {when!r}, but there is no pool of scored actions: name its "
            "file in recipe.expert_pool, or set recipe.expert.when=off"
        )
    if pool == WORLD:
        return WorldExpert(style)
    return load_pool(pathlib.Path(pool))
