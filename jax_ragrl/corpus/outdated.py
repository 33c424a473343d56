"""Facts that have changed since the passages of the generated encyclopedia were written.

The reader knows the current value, the passage states a former one: a search makes the answer
wrong. Which relations change can be learned from the words of a question, so that the best strategy
depends on the question: no search if all facts have changed, a search for the first hop if only the
last one has, and a plan of searches if none has.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from jax_ragrl.runtime.portable_random import pick

Facts = Mapping[str, Mapping[str, str]]


def former_facts(
    seed: int,
    facts: Facts,
    part: Mapping[str, Sequence[str]],
    objects: Mapping[str, str],
    changed: Sequence[str],
) -> dict[str, dict[str, str]]:
    """Returns the facts of one split as its passages state them.

    Args:
      seed: seed of the former values, which are drawn apart from those of the world.
      facts: current objects, by entity and relation.
      part: entities of the split, by kind.
      objects: the kind of the objects of each relation.
      changed: the relations whose facts have changed.
    """
    rng = random.Random(f"former facts {seed}")
    former = {name: dict(of_name) for name, of_name in facts.items()}
    for relation in changed:
        for name, of_name in former.items():
            if relation in of_name:
                others = [x for x in part[objects[relation]] if x not in (name, of_name[relation])]
                of_name[relation] = pick(rng, others) if others else of_name[relation]
    return former
