"""Labels of CoDA's planner and executor, and of single search agents.

The planner delegates the question as one task. An executor searches for its task, then quotes the
answer and gives it; if no passage has an answer, it searches once more, with keywords. Without an
answer in the passages of the second search there is no label: nothing teaches to guess.
"""

from __future__ import annotations

from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.rollout.system import State
from jax_ragrl.systems.coda import EXECUTOR, PLANNER
from jax_ragrl.systems.tags import TASK, render_turn
from jax_ragrl.warmstart.labels.gold import Evidence, answer_in, keywords, quote


class Labeler:
    """Writes the right turn of each role."""

    reads_known = False

    def write(self, role: str, state: State, evidence: Evidence) -> str:
        """Returns the right turn of a role in a state, from the gold in `evidence`."""
        question = evidence.question
        answer = answer_in(question, state.candidates)
        actions = [reply for reply in state.replies if isinstance(reply, ParsedAction)]
        if role == PLANNER:
            if not actions:
                return render_turn(think="I ask an assistant.", task=question.text)
            # An executor that failed has no result to read.
            if state.faults or not answer:
                return ""
            return render_turn(think="The result is the answer.", answer=answer)
        # CoDA's executor begins after the task; a single agent begins the rollout.
        refines = role == EXECUTOR
        tasks = [n for n, action in enumerate(actions) if action.action == TASK]
        turns = len(actions) - (tasks[-1] + 1 if tasks else 0)
        if not turns:
            return render_turn(think="I search for it.", search=question.text)
        if answer:
            sentence = quote(answer, state.candidates)
            if refines:
                return render_turn(think="I read it.", refine=sentence, answer=answer)
            return render_turn(think=sentence, answer=answer)
        if turns > 1:
            return ""
        refinement = "nothing" if refines else None
        query = keywords(question.text)
        return render_turn(think="It is not here.", refine=refinement, search=query)
