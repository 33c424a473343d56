"""Labels of CoDA's planner and executor, and of single search agents.

The planner delegates the question as one task. An executor searches for its task, then quotes the
answer and gives it; if no passage has an answer, it searches once more, with keywords. Without an
answer in the passages of the second search there is no label: nothing teaches to guess.
"""

from __future__ import annotations

from typing import Any

from jax_ragrl.systems.coda import PLANNER, State
from jax_ragrl.systems.tags import Conversation, SearchLoop, render_turn
from jax_ragrl.types import Passage
from jax_ragrl.warmstart.labels.gold import Evidence, answer_in, keywords, quote


class Labeler:
    """Writes the right turn of each role."""

    reads_known = False

    def write(self, role: str, state: Any, evidence: Evidence) -> str:
        """Returns the right turn of a role in a state, from the gold in `evidence`."""
        if role == PLANNER:
            return _plan(state, evidence)
        # The loop of CoDA's executor, or of the only agent.
        refines = isinstance(state, State)
        loop: SearchLoop = state.executor if refines else state.loop
        return _execute(loop.conversation, state.candidates, evidence, refines)


def _plan(state: State, evidence: Evidence) -> str:
    question = evidence.question
    if not state.planner.turns:
        return render_turn(think="I ask an assistant.", task=question.text)
    answer = answer_in(question, state.candidates)
    # An executor that failed has no result to read.
    if state.faults or not answer:
        return ""
    return render_turn(think="The result is the answer.", answer=answer)


def _execute(
    conversation: Conversation,
    passages: tuple[Passage, ...],
    evidence: Evidence,
    refines: bool,
) -> str:
    """Writes a turn of an executor.

    Args:
      conversation: the conversation so far.
      passages: the passages of the latest search.
      evidence: the question and its gold.
      refines: whether turns have a tag for the refined text.
    """
    if not conversation.turns:
        return render_turn(think="I search for it.", search=evidence.question.text)
    answer = answer_in(evidence.question, passages)
    if answer:
        sentence = quote(answer, passages)
        if refines:
            return render_turn(think="I read it.", refine=sentence, answer=answer)
        return render_turn(think=sentence, answer=answer)
    if conversation.turns > 1:
        return ""
    refinement = "nothing" if refines else None
    query = keywords(evidence.question.text)
    return render_turn(think="It is not here.", refine=refinement, search=query)
