"""Labels of C-3PO's roles.

The router answers from memory if the frozen language model knows the answer, plans if one search
does not find all of several gold passages, and searches otherwise. A decision searches for the
title of a gold passage that is missing and that the question or a document names; without one the
search is over. The filter selects the useful passages.
"""

from __future__ import annotations

from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.rollout.system import State
from jax_ragrl.systems.c3po import (
    FILTER,
    LLM,
    NO_RETRIEVAL,
    PLANNING,
    RETRIEVAL,
    ROUTER,
    render_decision,
    render_filter,
    render_router,
)
from jax_ragrl.warmstart.labels.gold import Evidence, useful_numbers


class Labeler:
    """Writes the right action of each role."""

    reads_known = True

    def write(self, role: str, state: State, evidence: Evidence) -> str:
        """Returns the right action of a role in a state, from the gold in `evidence`."""
        question = evidence.question
        if role == ROUTER:
            if evidence.is_known:
                return render_router(NO_RETRIEVAL)
            if evidence.takes_several_searches:
                return render_router(PLANNING)
            return render_router(RETRIEVAL, question.text)
        if role == FILTER:
            numbers = useful_numbers(question, state.candidates)
            names = " and ".join(map(str, numbers)) or "No document"
            return render_filter(f"{names} answers the question.", numbers)
        actions = [reply for reply in state.replies if isinstance(reply, ParsedAction)]
        tried = {query for action in actions if action.action == RETRIEVAL for query in action.args}
        if title := evidence.missing_title(state.documents, tried):
            return render_decision(f"{title} is missing.", RETRIEVAL, title)
        return render_decision("The search is over.", LLM)
