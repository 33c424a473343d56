"""A scripted teacher of OPERA's roles in the generated encyclopedia, and a pool of what it earns.

Where it is careless it plans in a single step, believes the first passage it is shown, or repeats
the query that failed.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence

from jax_ragrl.llm.base import FrozenLLM
from jax_ragrl.llm.reader import facts_of
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.effects import Segment
from jax_ragrl.systems.expert_pool import Candidate, Pool, Scribe, build_pool, candidates_of
from jax_ragrl.systems.mapgrpo import Groups, Injection
from jax_ragrl.systems.opera import Settings, recipe
from jax_ragrl.systems.opera_grammar import (
    ANALYSIS,
    PLAN,
    REWRITE,
    render_analysis,
    render_plan,
    render_rewrite,
)
from jax_ragrl.systems.opera_world import WorldExpert
from jax_ragrl.text.prompts import read_numbered
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.train.teacher import TeacherSampler
from jax_ragrl.types import Message, Question

_QUESTION = re.compile(r"^Question: (.*)$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Teacher:
    """How imperfect the teacher is: the chance of each of its flaws, in this order of roles."""

    style: str = "opera_tiny"
    single_step: float = 0.0
    credulous: float = 0.0
    stubborn: float = 0.0

    def write(
        self, role: str, messages: Sequence[Message], after: Sequence[Segment], rng: random.Random
    ) -> str:
        """The text of one action."""
        del after
        prompt = messages[-1].content
        chance = {PLAN: self.single_step, ANALYSIS: self.credulous, REWRITE: self.stubborn}
        if rng.random() < chance[role]:
            return self._careless(role, prompt)
        return WorldExpert(self.style).write(role, prompt)

    def _careless(self, role: str, prompt: str) -> str:
        asked = _QUESTION.findall(prompt)[-1]
        if role == PLAN:
            return render_plan([asked])
        if role == REWRITE:
            return render_rewrite("rephrase", asked)
        shown = read_numbered(self.style, prompt)
        value = next((v for _, text in shown[:1] for v in facts_of(text).values()), "")
        return render_analysis(f"{asked} is {value}" if value else "nothing", value)


def scored_pool(
    settings: Settings,
    questions: Sequence[Question],
    teachers: Sequence[Teacher],
    tokenizer: ChatTokenizer,
    retriever: Retriever,
    llm: FrozenLLM,
) -> Pool:
    """What several teachers write in groups of two at every decision, scored by carrying it out."""
    made, off = recipe(settings), Injection("off")
    whole, peeked = frozenset((PLAN,)), frozenset((REWRITE,))
    pairs = Groups(frozenset(made.system.roles), 2, off, None, whole, peeked)
    candidates: list[Candidate] = []
    for seed, teacher in enumerate(teachers):
        scribe = Scribe(TeacherSampler(teacher, tokenizer))
        environment = Environment(scribe, retriever, llm)
        forest = collect(made.system, pairs, questions, environment, seed=seed)
        candidates += candidates_of(forest, made.reward(forest), scribe.prompts)
    return build_pool(candidates)
