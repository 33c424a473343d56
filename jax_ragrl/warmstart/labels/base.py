"""Demonstrations from labels: a labeler plays every role of a system, with the gold in view.

A labeler is a script that reads the state of a rollout and the gold of its question. Some labels
depend on whether the frozen language model answers without passages; only then is the model asked.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from jax_ragrl.errors import UserError
from jax_ragrl.llm.base import FixedLLM, FrozenLLM
from jax_ragrl.retrieval.base import Retriever, search_all
from jax_ragrl.rollout.collect import ActionRequest, Environment, collect
from jax_ragrl.rollout.context import action_ids, context_ids
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.llm_policy import conversation
from jax_ragrl.rollout.system import System
from jax_ragrl.rollout.tree import Action
from jax_ragrl.run.evaluate import NoSampler
from jax_ragrl.runtime.progress import progress
from jax_ragrl.systems.baselines.standard import direct
from jax_ragrl.systems.opera.expert_pool import RecordingSampler
from jax_ragrl.systems.registry import system_module
from jax_ragrl.text.metrics import cover_match_tokens
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import Passage, Question
from jax_ragrl.warmstart import labels
from jax_ragrl.warmstart.demos import Demo
from jax_ragrl.warmstart.labels.gold import Evidence

# The labelers by the names of their systems: a new one is one file.
LABELERS = tuple(
    m.name for m in pkgutil.iter_modules(labels.__path__) if m.name not in ("base", "gold")
)


class Labeler(Protocol):
    """A script that writes the right action of each role of one system.

    Fields:
      reads_known: whether its labels depend on `Evidence.is_known`.
    """

    reads_known: bool

    def write(self, role: str, state: Any, evidence: Evidence) -> str:
        """Returns the right action; empty if the gold names none, which gives no demonstration."""
        ...


def labeler_of(system: str) -> Labeler:
    """Returns the labeler of a system, or of its `TEACHER`; raises `UserError` if it has none."""
    name = getattr(system_module(system), "TEACHER", system)
    if name not in LABELERS:
        raise UserError(
            f"--writer labels has no rules for system {system!r}: use a config of "
            f"{', '.join((*LABELERS, 'mmoa_rag'))}, or choose a language model"
        )
    labeler: Labeler = importlib.import_module(f"{labels.__name__}.{name}").Labeler()
    return labeler


class LabelSampler:
    """An action sampler that calls a labeler with the state and the gold of each request."""

    def __init__(
        self, labeler: Labeler, evidence: Mapping[str, Evidence], tokenizer: ChatTokenizer
    ):
        self._labeler, self._evidence, self._tokenizer = labeler, evidence, tokenizer

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        return [[self._action(request)] for request in requests]

    def _action(self, request: ActionRequest) -> Action:
        assert request.question is not None, "a rollout names the question of each request"
        role, evidence = request.role, self._evidence[request.question.id]
        text = self._labeler.write(role.name, request.state, evidence)
        chat = role.as_chat_turns
        prompt = context_ids(self._tokenizer, request.messages, request.history, chat)
        return Action(prompt, action_ids(self._tokenizer, text, chat), text)


def label_demos(
    system: System,
    labeler: Labeler,
    questions: Sequence[Question],
    retriever: Retriever,
    tokenizer: ChatTokenizer,
    llm: FrozenLLM | None = None,
    titles: Mapping[str, str] | None = None,
) -> list[Demo]:
    """Returns the distinct valid labels of one rollout per question.

    Without a language model, or if no label depends on it, no question counts as known, and calls
    of the model have empty replies. `titles` are those of gold passages, see `gold_titles`.

    Raises:
      EffectError: a search for all questions failed.
    """
    # A planner acts before any search, but its label depends on the passages of one.
    hits = search_all(retriever, [q.text for q in questions], system.top_k)
    known_ids: frozenset[str] = frozenset()
    if llm is not None and labeler.reads_known:
        known_ids = known_questions(llm, system.style, questions, retriever)
    evidence = {
        q.id: Evidence(q, h.passages, q.id in known_ids, titles or {})
        for q, h in zip(questions, hits, strict=True)
    }
    # A demonstration needs the messages of a prompt; an action holds only its ids.
    recorder = RecordingSampler(LabelSampler(labeler, evidence, tokenizer))
    # The frozen model plans the searches that a label then makes, and answers their parts. The
    # prompts of other systems show no reply.
    frozen = llm if llm is not None and labeler.reads_known else FixedLLM("")
    environment = Environment(recorder, retriever, frozen)
    forest = collect(system, single_chain, questions, environment)
    demos = (
        Demo(
            forest.questions[record.question].id,
            record.role,
            conversation(tokenizer, recorder.prompts[record.action.prompt_ids]),
            record.action.text,
            chat=system.roles[record.role].as_chat_turns,
        )
        for record in forest.records
        if record.action is not None and not record.parse_error
    )
    return list(dict.fromkeys(demos))


def gold_titles(questions: Iterable[Question], passages: Iterable[Passage]) -> dict[str, str]:
    """Returns the titles of the gold passages, by the names that questions give them."""
    names = {name for question in questions for name in question.gold}
    return {name: p.title for p in passages for name in p.names & names}


def known_questions(
    llm: FrozenLLM, style: str, questions: Sequence[Question], retriever: Retriever
) -> frozenset[str]:
    """Returns the ids of the questions that a model answers right without passages (cover-EM)."""
    environment = Environment(NoSampler(), retriever, llm)
    # A loop of its own: the demonstrations count each question once.
    with progress("answers from memory", "question", len(questions)):
        forest = collect(direct(style), single_chain, questions, environment)
    pairs = zip(questions, forest.leaves(), strict=True)
    return frozenset(
        q.id for q, leaf in pairs if leaf and cover_match_tokens(leaf.answer or "", q.answers)
    )
