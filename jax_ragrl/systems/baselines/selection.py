"""BGM, untrained: the language model selects the passages to read, and their order.

Ke et al. 2024, "Bridging the Preference Gap between Retrievers and LLMs". The frozen language model
takes the place of the trained bridge. It selects each passage at most once; the bridge of the paper
may repeat one.
"""

from __future__ import annotations

import dataclasses
import re

from jax_ragrl.rollout.effects import Search
from jax_ragrl.rollout.roles import ParsedAction, invalid_action
from jax_ragrl.rollout.system import Steps
from jax_ragrl.systems.baselines.script import ScriptedSystem, report_fault
from jax_ragrl.types import Question

_LIST = re.compile(r"[0-9]{1,4}(?:\s*,\s*[0-9]{1,4})*")


def parse_selection(text: str, count: int) -> ParsedAction:
    """Parses the first comma-separated list of numbers from 1 to `count`, or `none`."""
    match = _LIST.search(text)
    if not match:
        # An empty selection is legal; the answer is then given from memory.
        none = text.strip().strip(".").lower() == "none"
        return ParsedAction("Select") if none else invalid_action("Invalid Selection")
    numbers = tuple(dict.fromkeys(int(item) for item in match[0].split(",")))
    if not all(1 <= number <= count for number in numbers):
        return invalid_action("Invalid Document Idx")
    return ParsedAction("Select", numbers)


@dataclasses.dataclass(frozen=True)
class Selection(ScriptedSystem):
    """Selects at most `top_k` of `pool * top_k` passages.

    If the selection is malformed, the first `top_k` passages of the retriever are read.
    """

    FAULTS = {
        "Invalid Selection": "None of the selected documents was shown.",
        "Invalid Document Idx": "The selection holds something other than numbers of documents.",
    }

    pool: int = 2

    def steps(self, question: Question) -> Steps:
        """Searches, selects and answers."""
        passages = (yield Search(question.text, self.pool * self.top_k)).passages
        reply = yield self.ask("select", question, passages)
        selection = yield from report_fault(parse_selection(reply, len(passages)))
        if selection.valid:
            passages = [passages[i - 1] for i in selection.args]
        yield from self.finish(question, passages[: self.top_k])
