"""SlimPLM: the draft of a small model decides whether the large model searches, and for what.

Tan et al. 2024, "Small Models, Big Insights: Leveraging Slim Proxy Models to Decide When and What
to Retrieve for LLMs".

Departures from the paper
  1. One policy drafts, judges and rewrites; the paper has a chat model and two fine-tuned models.
  2. The output of the judge is masked to two letters. A malformed judgement counts as unknown, as
     in the paper's code.
  3. The rewriter writes one query per line; in the paper it lists the claims of the draft with a
     query for each, and the judge then drops the claims that are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_ragrl.rollout.effects import Done, Generate
from jax_ragrl.rollout.roles import ParsedAction, Role, invalid_action
from jax_ragrl.rollout.system import Steps, StrategyChoice
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.baselines.examples import ChatExample
from jax_ragrl.systems.baselines.script import ScriptedSystem, letter_role
from jax_ragrl.systems.baselines.standard import parse_queries, search_together
from jax_ragrl.text.metrics import cover_match_tokens
from jax_ragrl.text.patterns import line, lines
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import Message, Question, Sampling

DRAFTER, GATE, REWRITER = "drafter", "gate", "rewriter"
SKIP_SEARCH, NEEDS_SEARCH = "A", "B"
_QUERY = line(first='-*•"0123456789')  # list marks and quotes do not belong to a query


def parse_draft(text: str) -> ParsedAction:
    """Parses any text that is not empty."""
    draft = text.strip()
    return ParsedAction("Draft", (draft,)) if draft else invalid_action("Empty Draft")


@dataclasses.dataclass(frozen=True)
class SlimPLM(ScriptedSystem):
    """Drafts and judges; searches with at most `queries` queries if the draft is not trusted.

    Without a readable query it searches for the question. The frozen model never sees the draft.
    """

    FAULTS = {
        "Empty Draft": "The draft answer holds no text.",
        "Invalid Gate": "The prompt does not offer this verdict on whether to search.",
    }

    queries: int = 3

    @property
    def roles(self) -> Mapping[str, Role]:
        """Drafter, gate and rewriter; greedy."""
        short, queries = Sampling(0.0, 1.0, 128), rf"{_QUERY}(?:\n{_QUERY})*"
        return {
            DRAFTER: Role(DRAFTER, parse_draft, short, action_regex=lines()),
            GATE: letter_role(GATE, "AB", "Invalid Gate"),
            REWRITER: Role(REWRITER, parse_queries, short, action_regex=queries),
        }

    def steps(self, question: Question) -> Steps:
        """Drafts and judges, rewrites and searches if needed (all queries at once), answers."""
        draft = yield from self.draft(question)
        gate = yield Generate(GATE, gate_prompt(self.style, question, draft), 2)
        yield StrategyChoice("direct" if gate.action == SKIP_SEARCH else "retrieve")
        if gate.action == SKIP_SEARCH:
            yield from self.finish(question, ())
        values = {"question": question.text, "draft": draft, "limit": str(self.queries)}
        claims = yield Generate(REWRITER, user_turn(self.style, "claims", **values), 3)
        queries = claims.args[: self.queries] or (question.text,)
        documents = yield from search_together(queries, self.top_k)
        yield from self.finish(question, documents)

    def draft(self, question: Question) -> Steps:
        """Returns the text of the draft; empty if it is malformed."""
        prompt = user_turn(self.style, "draft", question=question.text)
        return draft_text((yield Generate(DRAFTER, prompt)))


def draft_text(draft: ParsedAction) -> str:
    """Returns the text of a draft; empty if it is malformed."""
    return draft.args[0] if draft.valid else ""


def gate_prompt(style: str, question: Question, draft: str) -> tuple[Message, ...]:
    """Returns the prompt of the gate, which reads the text of the draft."""
    return user_turn(style, "gate", question=question.text, draft=draft)


# --- Its training data ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DraftOnly(SlimPLM):
    """SlimPLM that stops after the draft, which is all that the gate is trained on."""

    def steps(self, question: Question) -> Steps:
        """Drafts, and ends without an answer, so that no judge grades the draft."""
        yield from self.draft(question)
        yield Done(None, "drafted")


def gate_examples(style: str, forest: Forest) -> list[tuple[str, ChatExample]]:
    """Returns one supervised example per draft for the gate, with the id of its question.

    The target is `SKIP_SEARCH` if the draft contains a gold answer in whole words.
    """
    examples = []
    for record in forest.records:
        question = forest.questions[record.question]
        if record.role != DRAFTER or record.parsed is None or not question.answers:
            continue
        draft = draft_text(record.parsed)
        is_right = cover_match_tokens(draft, question.answers)
        letter = SKIP_SEARCH if is_right else NEEDS_SEARCH
        example = ChatExample(gate_prompt(style, question, draft), letter, GATE)
        examples.append((question.id, example))
    return examples
