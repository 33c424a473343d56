"""SlimPLM: a small model's draft decides whether the large one has to search, and for what.

Tan et al. 2024, "Small Models, Big Insights: Leveraging Slim Proxy Models to Decide When and What
to Retrieve for LLMs".

Departures from the paper
  1. One policy drafts, judges and rewrites; the paper has a chat model and two fine-tuned ones.
  2. The judge's output is masked to two letters; a malformed judgement counts as unknown, as in the
     paper's code.
  3. The rewriter writes its queries at once, one a line; the paper's lists the claims of the draft
     with a query each, and the judge then drops the claims that are known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_ragrl.rollout.effects import Done, Generate, Search
from jax_ragrl.rollout.roles import Parsed, Role, malformed
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.baselines.rewrite import dealt, parse_queries
from jax_ragrl.systems.baselines.rows import Row
from jax_ragrl.systems.baselines.scripted import Chosen, Scripted, Steps, all_of, finish
from jax_ragrl.text.metrics import cover_match_tokens
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import Message, Question, Sampling

DRAFTER, GATE, REWRITER = "drafter", "gate", "rewriter"
KNOWN, UNKNOWN = "A", "B"


def parse_draft(text: str) -> Parsed:
    """Any text but none at all."""
    draft = text.strip()
    return Parsed("Draft", (draft,)) if draft else malformed("Empty Draft")


def parse_gate(text: str) -> Parsed:
    """One of the letters A and B and nothing else."""
    letter = text.strip()
    return Parsed(letter) if letter in (KNOWN, UNKNOWN) else malformed("Invalid Gate")


@dataclasses.dataclass(frozen=True)
class SlimPLM(Scripted):
    """Draft and judge; where the draft is not trusted, search for it with at most `queries`.

    Without a readable query the question itself is searched. The frozen language model never sees
    the draft.
    """

    queries: int = 3

    @property
    def roles(self) -> Mapping[str, Role]:
        """Drafter, gate and rewriter; greedy."""
        return {
            DRAFTER: Role(DRAFTER, parse_draft, Sampling(0.0, 1.0, 128)),
            GATE: Role(GATE, parse_gate, Sampling(0.0, 1.0, 1), tokens="[AB]"),
            REWRITER: Role(REWRITER, parse_queries, Sampling(0.0, 1.0, 128)),
        }

    def steps(self, question: Question) -> Steps:
        """Draft, judge; rewrite and search (all queries at once) where it is unknown; answer."""
        draft = drafted((yield Generate(DRAFTER, draft_of(self.style, question))))
        gate = yield Generate(GATE, judge(self.style, question, draft), 2)
        yield Chosen("direct" if gate.action == KNOWN else "retrieve")
        if gate.action == KNOWN:
            yield from finish(self.style, question, ())
        values = {"question": question.text, "draft": draft, "limit": str(self.queries)}
        parsed = yield Generate(REWRITER, user_turn(self.style, "claims", **values), 3)
        queries = parsed.args[: self.queries] or (question.text,)
        found = yield from all_of([Search(query, self.top_k) for query in queries])
        documents = dealt([hits.passages for hits in found], self.top_k)
        yield from finish(self.style, question, documents)


def draft_of(style: str, question: Question) -> tuple[Message, ...]:
    """What the drafter reads."""
    return user_turn(style, "draft", question=question.text)


def drafted(parsed: Parsed) -> str:
    """The draft; empty where it is malformed."""
    return parsed.args[0] if parsed.valid else ""


def judge(style: str, question: Question, draft: str) -> tuple[Message, ...]:
    """What the gate reads."""
    return user_turn(style, "gate", question=question.text, draft=draft)


# --- Its training data ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Drafts(SlimPLM):
    """The draft alone, all that the gate learns from: nothing is searched, judged or answered."""

    def steps(self, question: Question) -> Steps:
        """Draft, and end without an answer, so that no judge grades the draft."""
        yield Generate(DRAFTER, draft_of(self.style, question))
        yield Done(None, "drafted")


def gate_rows(style: str, forest: Forest) -> list[tuple[str, Row]]:
    """One row a draft for the gate: known where the draft holds a gold answer, in whole words.

    Before a row stands its question's id. Questions without a gold answer give no row.
    """
    rows = []
    for record in forest.records:
        question = forest.questions[record.question]
        if record.role != DRAFTER or record.parsed is None or not question.answers:
            continue
        draft = drafted(record.parsed)
        letter = KNOWN if cover_match_tokens(draft, question.answers) else UNKNOWN
        rows.append((question.id, Row(judge(style, question, draft), letter, GATE)))
    return rows
