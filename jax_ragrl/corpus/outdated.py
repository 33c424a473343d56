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
    parts: Sequence[Mapping[str, Sequence[str]]],
    objects: Mapping[str, str],
    outdated_relations: Sequence[str],
) -> dict[str, dict[str, str]]:
    """Returns the facts as the passages state them.

    Args:
      seed: seed of the former values, which are drawn apart from the values of the world.
      facts: current objects, by entity and relation.
      parts: entities of each split, by kind; a former object is of the split of its entity.
      objects: the kind of the objects of each relation.
      outdated_relations: the relations whose facts have changed.
    """
    rng = random.Random(f"former facts {seed}")
    # Copies, so that the questions keep their current facts.
    former = {name: dict(of_name) for name, of_name in facts.items()}
    for part in parts:
        for name in (name for members in part.values() for name in members):
            for relation in [r for r in facts[name] if r in outdated_relations]:
                # Nobody is married to themselves, and a former value is not the current one.
                not_former = {name, facts[name][relation]}
                others = [x for x in part[objects[relation]] if x not in not_former]
                former[name][relation] = pick(rng, others)
    return former
