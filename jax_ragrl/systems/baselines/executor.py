"""One agent that thinks, searches and answers by itself: CoDA without its hierarchy.

Five published agents are this loop with another prompt and another reward:
  AutoRefine   refines what it found; the answer's F1, or 0.1 where a gold answer was refined
  Search-R1    does not refine; exact match (Jin et al. 2025)
  R1-Searcher  does not refine; F1, less 2 where the form is violated (Song et al. 2025)
  ReSearch     does not refine; F1, or 0.1 where that is 0, of the right form (Chen et al. 2025)
  Auto-RAG     refines what it found; supervised, on its teacher's traces that end right (Yu et al.
               2024): stages of a warm-up with `only_correct`. Its reward here is exact match.

Departures from their published code: turns are cut by ids (see CoDA's first departure), and all
five use one set of tags. Where Search-R1 appends a last turn in which a search is ignored, here a
search in the last turn is never made: its two turns and the last one are `max_turns=3`. R1-Searcher
is its second stage; a violation is a turn without an action, no answer, tags that do not match, or
an answer of more than ten words. It subtracts a baseline only; here its groups are normalised like
those of the others. Auto-RAG's model writes documents of its own once its searches are used up;
here there are none. Its code searches once more after a turn without an action, and leaves out
passages that were shown before; here such a turn is reminded, and passages may come again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import earned, shared
from jax_ragrl.rollout.effects import Done, Effect, Generate, Search
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.base import Credit, Recipe, Reply, path_to
from jax_ragrl.systems.coda import (
    EXECUTOR_ACTIONS,
    ROLLOUT_ADVANTAGES,
    observation,
    parse_executor,
    rollout_advantages,
)
from jax_ragrl.systems.tags import (
    ANSWER,
    REFINE,
    SEARCH,
    THINK,
    Context,
    Errand,
    closing,
    contents,
    well_formed,
)
from jax_ragrl.text.metrics import cover_match, exact_match, f1
from jax_ragrl.text.prompts import numbered, user_turn
from jax_ragrl.types import Hits, Passage, Question, Sampling

AGENT = "agent"
MAX_ANSWER_WORDS = 10
Metric = Callable[[str, Sequence[str]], float]


@dataclasses.dataclass(frozen=True)
class State:
    """An errand about the question itself, and the passages that were found last."""

    errand: Errand
    candidates: tuple[Passage, ...] = ()
    depth: int = 1


@dataclasses.dataclass(frozen=True)
class SearchAgent:
    """The system. `prompt` is `executor` (with refinement) or `search` (without)."""

    prompt: str = "executor"
    style: str = "coda"
    top_k: int = 3
    max_turns: int = 6
    sampling: Sampling = Sampling(1.0, 1.0, 512)
    chat: bool = False

    @property
    def roles(self) -> Mapping[str, Role]:
        """The agent."""
        stops = closing(EXECUTOR_ACTIONS)
        return {AGENT: Role(AGENT, parse_executor, self.sampling, stops=stops, chat=self.chat)}

    def start(self, question: Question) -> State:
        """The agent and the question."""
        return State(Errand(Context(question.text)))

    def wants(self, state: State) -> Effect:
        """A search, a turn, or nothing more."""
        errand = state.errand
        if errand.why:
            return Done(errand.result or None, errand.why)
        if errand.query:
            return Search(errand.query, self.top_k)
        about = user_turn(self.style, self.prompt, task=errand.context.about)
        return Generate(AGENT, about, state.depth, errand.context.after)

    def advance(self, state: State, reply: Reply) -> State:
        """The state after a search or a turn."""
        if isinstance(reply, Hits):
            shown = self._observe("documents", documents=numbered(self.style, reply.passages))
            return dataclasses.replace(
                state, errand=state.errand.found(shown), candidates=reply.passages
            )
        assert isinstance(reply, Parsed)
        errand = state.errand.acted(reply, self.max_turns, self._observe("retry_executor"))
        return dataclasses.replace(state, errand=errand, depth=state.depth + 1)

    def _observe(self, name: str, **values: str) -> str:
        return observation(self.style, name, self.chat, **values)


# --- Rewards ------------------------------------------------------------------------------------


def autorefine_reward(answer: str, answers: Sequence[str], turns: Sequence[Parsed]) -> float:
    """F1 of the answer; where that is 0, 0.1 if a gold answer stands in what was refined."""
    refined = " ".join(contents(turn.text, REFINE) for turn in turns)
    hit = bool(refined.strip()) and cover_match(refined, answers) > 0
    return _scored(f1, answer, answers) or 0.1 * hit


def search_r1_reward(answer: str, answers: Sequence[str], turns: Sequence[Parsed]) -> float:
    """Exact match of the answer."""
    del turns
    return _scored(exact_match, answer, answers)


def r1_searcher_reward(answer: str, answers: Sequence[str], turns: Sequence[Parsed]) -> float:
    """F1 of the answer, less 2 where the form is violated."""
    right = right_form(turns) and len(answer.split()) <= MAX_ANSWER_WORDS
    return _scored(f1, answer, answers) - 2.0 * (not right)


def research_reward(answer: str, answers: Sequence[str], turns: Sequence[Parsed]) -> float:
    """0 where the form is violated; else F1 of the answer, or 0.1 where that is 0."""
    return (_scored(f1, answer, answers) or 0.1) if right_form(turns) else 0.0


def right_form(turns: Sequence[Parsed]) -> bool:
    """Whether every turn acts, an answer and thoughts are there, and all tags match."""
    text = "".join(turn.text for turn in turns)
    searched = f"<{SEARCH}>" in text or f"</{SEARCH}>" in text
    tags = (THINK, ANSWER) + ((SEARCH,) if searched else ())
    return all(turn.valid for turn in turns) and well_formed(text, tags)


def _scored(metric: Metric, answer: str, answers: Sequence[str]) -> float:
    """The score of an answer; of none 0, also where a gold one is an article and says as little."""
    return metric(answer, answers) if answer else 0.0


class Kind(NamedTuple):
    """What tells the agents apart: a prompt, and a reward of (answer, gold answers, turns)."""

    prompt: str
    reward: Callable[[str, Sequence[str], Sequence[Parsed]], float]


KINDS: Mapping[str, Kind] = {
    "autorefine": Kind("executor", autorefine_reward),
    "search_r1": Kind("search", search_r1_reward),
    "r1_searcher": Kind("search", r1_searcher_reward),
    "research": Kind("search", research_reward),
    "auto_rag": Kind("executor", search_r1_reward),
}


# --- The recipe ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of a run; `kind` is one of `KINDS`."""

    kind: str = "autorefine"
    style: str = "coda"
    top_k: int = 3
    max_turns: int = 6
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    chat: bool = False
    rollouts: int = 5

    def __post_init__(self) -> None:
        one_of("recipe.kind", self.kind, KINDS)


def autorefine() -> Settings:
    """AutoRefine: five turns and the last one."""
    return Settings("autorefine", max_turns=6)


def search_r1() -> Settings:
    """Search-R1: two turns and the last one."""
    return Settings("search_r1", max_turns=3, max_tokens=500)


def r1_searcher() -> Settings:
    """R1-Searcher: groups of sixteen."""
    return Settings("r1_searcher", rollouts=16)


def research() -> Settings:
    """ReSearch: groups of five."""
    return Settings("research")


def auto_rag() -> Settings:
    """Auto-RAG: ten turns and the last one."""
    return Settings("auto_rag", max_turns=11, max_tokens=200)


def reward(forest: Forest, kind: str) -> np.ndarray:
    """The agent's reward on each rollout's leaf, float32 `[N]`."""
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        record = forest.records[leaf]
        answers = forest.questions[record.question].answers
        turns = [r.parsed for r in path_to(forest, leaf) if r.parsed]
        reward_N[leaf] = KINDS[kind].reward(record.answer or "", answers, turns)
    return reward_N


# With a critic a rollout needs no others: its reward is the return of each of its turns.
ADVANTAGES: Mapping[str, Credit] = {**ROLLOUT_ADVANTAGES, "gae": shared, "whitened_gae": shared}


def recipe(settings: Settings) -> Recipe:
    """Whole rollouts in groups, normalised (GRPO), or each by itself with a critic (PPO)."""
    system = SearchAgent(
        KINDS[settings.kind].prompt,
        settings.style,
        settings.top_k,
        settings.max_turns,
        Sampling(settings.temperature, settings.top_p, settings.max_tokens),
        settings.chat,
    )
    return Recipe(
        system,
        functools.partial(reward, kind=settings.kind),
        rollout_advantages,
        rollouts=settings.rollouts,
        metric="em",
        advantages=ADVANTAGES,
        turns=earned,
    )
