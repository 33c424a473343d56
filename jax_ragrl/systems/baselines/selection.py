"""BGM, untrained: the language model chooses which passages are read, and in which order.

Ke et al. 2024, "Bridging the Preference Gap between Retrievers and LLMs", with the frozen language
model in the place of the trained bridge. A passage is chosen once at most; the paper's bridge may
repeat one.
"""

from __future__ import annotations

import dataclasses
import re

from jax_ragrl.rollout.effects import Search
from jax_ragrl.rollout.roles import Parsed, malformed
from jax_ragrl.systems.baselines.scripted import Scripted, Steps, ask, checked, finish
from jax_ragrl.text.prompts import numbered
from jax_ragrl.types import Question

_LIST = re.compile(r"[0-9]{1,4}(?:\s*,\s*[0-9]{1,4})*")


def parse_selection(text: str, count: int) -> Parsed:
    """Numbers from 1 to `count` separated by commas, or `none`; the first such list counts."""
    found = _LIST.search(text)
    if not found:
        none = text.strip().strip(".").lower() == "none"
        return Parsed("Select") if none else malformed("Invalid Selection")
    numbers = tuple(dict.fromkeys(int(item) for item in found[0].split(",")))
    if not all(1 <= number <= count for number in numbers):
        return malformed("Invalid Document Idx")
    return Parsed("Select", numbers)


@dataclasses.dataclass(frozen=True)
class Selection(Scripted):
    """Chooses at most `top_k` of `pool * top_k` passages; malformed: the retriever's first."""

    pool: int = 2

    def steps(self, question: Question) -> Steps:
        """Search, select, answer."""
        hits = yield Search(question.text, self.pool * self.top_k)
        shown = numbered(self.style, hits.passages)
        reply = yield ask(self.style, "select", question=question.text, documents=shown)
        parsed = yield from checked(parse_selection(reply, len(hits.passages)))
        chosen = [hits.passages[i - 1] for i in parsed.args] if parsed.valid else hits.passages
        yield from finish(self.style, question, chosen[: self.top_k])
