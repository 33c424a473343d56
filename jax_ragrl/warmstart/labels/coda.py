"""Labels of CoDA's planner and executor, and of single search agents.

The planner delegates the question as one task. An executor searches for its task, then quotes the
answer and gives it. It searches once more, for the title of a gold passage that is missing and that
the question or a passage names, or, if no passage has an answer, with keywords. Without an answer
in the passages of both searches there is no label: nothing teaches to guess.
"""

from __future__ import annotations

from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.rollout.system import Shown, State
from jax_ragrl.systems.coda import EXECUTOR, PLANNER
from jax_ragrl.systems.tags import TASK, render_turn
from jax_ragrl.warmstart.labels.gold import Evidence, answer_in, keywords, quote


class Labeler:
    """Writes the right turn of each role."""

    reads_known = False

    def write(self, role: str, state: State, evidence: Evidence) -> str:
        """Returns the right turn of a role in a state, from the gold in `evidence`."""
        question = evidence.question
        read = [p for note in state.notes if isinstance(note, Shown) for p in note.passages]
        answer = answer_in(question, read)
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
        sentence = quote(answer, read) if answer else "nothing"
        title = evidence.missing_title(read) if turns == 1 else ""
        if answer and not title:
            if refines:
                return render_turn(think="I read it.", refine=sentence, answer=answer)
            return render_turn(think=sentence, answer=answer)
        if turns > 1:
            return ""
        refinement = sentence if refines else None
        why = f"{title} is missing." if title else "It is not here."
        query = title or keywords(question.text)
        return render_turn(think=why, refine=refinement, search=query)
