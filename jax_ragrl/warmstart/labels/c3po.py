"""Labels of C-3PO's roles, for questions that one search answers.

The router searches unless the frozen language model knows the answer; the filter selects the useful
passages; a decision, which no label leads to, hands over to the language model.
"""

from __future__ import annotations

from jax_ragrl.rollout.system import State
from jax_ragrl.systems.c3po import (
    FILTER,
    LLM,
    NO_RETRIEVAL,
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
            route = (NO_RETRIEVAL, "") if evidence.is_known else (RETRIEVAL, question.text)
            return render_router(*route)
        if role == FILTER:
            numbers = useful_numbers(question, state.candidates)
            names = " and ".join(map(str, numbers)) or "No document"
            return render_filter(f"{names} answers the question.", numbers)
        return render_decision("The search is over.", LLM)
