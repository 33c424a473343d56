"""Labels of MAO-ARAG's planner: the cheapest workflow that can lead to the answer.

No search if the answer generator knows the answer; a search alone if its first passage is useful; a
selection if a later one is; a rewritten query if none is. If a search does not find all of several
gold passages, the question is decomposed, and each part searched for.
"""

from __future__ import annotations

from jax_ragrl.rollout.system import State
from jax_ragrl.systems.mao_arag import AG, DS, QDS, QR, SUB_PLANNER, R, render_plan
from jax_ragrl.warmstart.labels.gold import Evidence, useful_numbers


class Labeler:
    """Writes the right plan."""

    reads_known = True

    def write(self, role: str, state: State, evidence: Evidence) -> str:
        """Returns the right plan for the question in `evidence`, or for a part of it."""
        del state
        return render_plan((R, AG) if role == SUB_PLANNER else workflow(evidence))


def workflow(evidence: Evidence) -> tuple[str, ...]:
    """Returns the cheapest workflow that can lead to the answer."""
    if evidence.is_known:
        return (AG,)
    if evidence.takes_several_searches:
        return (QDS,)
    numbers = useful_numbers(evidence.question, evidence.passages)
    if not numbers:
        return (QR, R, AG)
    return (R, AG) if numbers[0] == 1 else (R, DS, AG)
