"""Labels of OPERA's roles, for questions that one search answers.

The plan is the question itself; an analysis quotes the answer, or says no; a rewritten query is the
title of a gold passage that is missing and that the question or a passage names, or the keywords of
the question.
"""

from __future__ import annotations

from jax_ragrl.rollout.system import State
from jax_ragrl.systems.opera.grammar import (
    ANALYSIS,
    PLAN,
    render_analysis,
    render_plan,
    render_rewrite,
)
from jax_ragrl.systems.opera.system import previews
from jax_ragrl.warmstart.labels.gold import Evidence, answer_in, keywords, quote


class Labeler:
    """Writes the right action of each role."""

    reads_known = False

    def write(self, role: str, state: State, evidence: Evidence) -> str:
        """Returns the right action of a role in a state, from the gold in `evidence`."""
        question = evidence.question
        if role == PLAN:
            return render_plan([question.text])
        if role == ANALYSIS:
            answer = answer_in(question, state.candidates)
            text = quote(answer, state.candidates) if answer else "No document has the answer."
            return render_analysis(text, answer)
        title = evidence.missing_title(previews(state.candidates))
        return render_rewrite("rephrase", title or keywords(question.text))
