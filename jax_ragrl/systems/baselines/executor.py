"""One agent that thinks, searches and answers: CoDA without its hierarchy.

Five published agents are this loop with different prompts and rewards:
  AutoRefine   refines the passages; F1 of the answer, or 0.1 if that is 0 and the refined text
               contains a gold answer
  Search-R1    does not refine; exact match (Jin et al. 2025)
  R1-Searcher  does not refine; F1, minus 2 if the form is violated (Song et al. 2025)
  ReSearch     does not refine; F1, or 0.1 if that is 0 and the form is right (Chen et al. 2025)
  Auto-RAG     refines the passages; supervised, on traces of its teacher that end with a right
               answer (Yu et al. 2024): stages of a warm-up with `only_correct`. Its reward here is
               exact match.

Departures from their published code
  1. Turns are cut by token ids (see CoDA's first departure), and all five use the same tags.
  2. Search-R1 appends a last turn in which a search is ignored. Here a search in the last turn is
     never performed: its two turns and the last one are `max_turns=3`.
  3. R1-Searcher is its second stage. A violation is a turn without an action, a missing answer,
     tags that do not match, or an answer of more than ten words. The published code only subtracts
     a baseline; here its groups are normalized as for the other agents.
  4. Auto-RAG's model writes its own documents after its last search; here it does not. Its code
     searches once more after a turn without an action, and omits passages that an earlier search
     returned. Here such a turn is followed by a reminder, and passages may repeat.
  5. AutoRefine's refined text contains a gold answer if it contains its tokens, not as a substring.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jax_ragrl.config.ranges import Count, Positive, Probability
from jax_ragrl.config.schema import one_of
from jax_ragrl.credit.assign import immediate_credit, over_rollouts, shared_credit
from jax_ragrl.rollout.effects import Done
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import Steps
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems import tags
from jax_ragrl.systems.base import Recipe, path_from_root
from jax_ragrl.systems.coda import EXECUTOR_ACTIONS, EXECUTOR_NOTES
from jax_ragrl.systems.tags import ANSWER, REFINE, SEARCH, THINK
from jax_ragrl.text.metrics import cover_match_tokens, exact_match, f1
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import Question, Sampling

AGENT = "agent"
TEACHER = "coda"  # the teacher of the warm-up: its executors are this agent
MAX_ANSWER_WORDS = 10  # R1-Searcher's limit
# From an answer, the gold answers and the turns to the reward of a rollout.
Reward = Callable[[str, Sequence[str], Sequence[ParsedAction]], float]


@dataclasses.dataclass(frozen=True)
class SearchAgent:
    """The system, and the config section `recipe.system`.

    Fields:
      kind: the published agent, one of `KINDS`; it selects the prompt and the reward.
      style: the folder of the prompts.
      top_k: passages per search.
      max_turns: turns of the agent, the last one included.
      max_tokens, temperature, top_p: how each turn is sampled.
      as_chat_turns: observations are chat turns of the user, not plain text.
    """

    FAULTS = tags.TAG_FAULTS

    kind: str = "autorefine"
    style: str = "coda"
    top_k: Count = 3
    max_turns: Count = 6
    max_tokens: Count = 512
    temperature: Positive = 1.0
    top_p: Probability = 1.0
    as_chat_turns: bool = False

    def __post_init__(self) -> None:
        one_of("recipe.system.kind", self.kind, KINDS)

    @property
    def roles(self) -> Mapping[str, Role]:
        how = Sampling(self.temperature, self.top_p, self.max_tokens), self.as_chat_turns
        return {AGENT: tags.turn_role(AGENT, EXECUTOR_ACTIONS, EXECUTOR_NOTES, *how)}

    def steps(self, question: Question) -> Steps:
        """The agent searches until it answers."""
        prompt = user_turn(self.style, KINDS[self.kind][0], task=question.text)
        search = functools.partial(tags.search_passages, self.style, self.top_k, self.as_chat_turns)
        answer, reason, depth = yield from tags.converse(AGENT, prompt, self.max_turns, search)
        yield Done(answer or None, reason, depth)


# --- Rewards ------------------------------------------------------------------------------------


def autorefine_reward(answer: str, answers: Sequence[str], turns: Sequence[ParsedAction]) -> float:
    """AutoRefine: F1; if that is 0, 0.1 if the refined text of the turns contains a gold answer.

    A missing answer is empty, here and in the functions below.
    """
    refinement = " ".join(tags.tag_contents(turn.text, REFINE) for turn in turns)
    return f1(answer, answers) or 0.1 * cover_match_tokens(refinement, answers)


def search_r1_reward(answer: str, answers: Sequence[str], turns: Sequence[ParsedAction]) -> float:
    """Search-R1: exact match of `answer` with one of `answers`; `turns` do not matter."""
    del turns
    return exact_match(answer, answers)


def r1_searcher_reward(answer: str, answers: Sequence[str], turns: Sequence[ParsedAction]) -> float:
    """R1-Searcher: F1, minus 2 if `turns` violate the form or `answer` has too many words."""
    valid = is_well_formed(turns) and len(answer.split()) <= MAX_ANSWER_WORDS
    return f1(answer, answers) - 2.0 * (not valid)


def research_reward(answer: str, answers: Sequence[str], turns: Sequence[ParsedAction]) -> float:
    """ReSearch: F1 of `answer` with `answers`, at least 0.1; 0 if `turns` violate the form."""
    return (f1(answer, answers) or 0.1) if is_well_formed(turns) else 0.0


def is_well_formed(turns: Sequence[ParsedAction]) -> bool:
    """Returns whether every turn has an action, and answer, thoughts and matching tags exist."""
    text = "".join(turn.text for turn in turns)
    has_search = f"<{SEARCH}>" in text or f"</{SEARCH}>" in text
    # An agent may answer without a search: the tags of a search are optional.
    required = (THINK, ANSWER) + ((SEARCH,) if has_search else ())
    return all(turn.valid for turn in turns) and tags.tags_match(text, required)


# The prompt of each published agent, and its reward.
KINDS: Mapping[str, tuple[str, Reward]] = {
    "autorefine": ("executor", autorefine_reward),
    "search_r1": ("search", search_r1_reward),
    "r1_searcher": ("search", r1_searcher_reward),
    "research": ("search", research_reward),
    "auto_rag": ("executor", search_r1_reward),
}


# --- The recipe ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`: the agent, and the number of rollouts per question."""

    system: SearchAgent = SearchAgent()
    rollouts: Count = 5


# The published settings; each number of turns includes the last one.
AUTOREFINE = Settings(SearchAgent("autorefine", max_turns=6))
SEARCH_R1 = Settings(SearchAgent("search_r1", max_turns=3, max_tokens=500))
AUTO_RAG = Settings(SearchAgent("auto_rag", max_turns=11, max_tokens=200))


def reward(forest: Forest, kind: str) -> np.ndarray:
    """Returns the reward of the agent `kind` on the leaf of each rollout, float32 `[N]`."""
    reward_N = np.zeros(len(forest.records), np.float32)
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        record = forest.records[leaf]
        answers = forest.questions[record.question].answers
        actions = (forest.records[node].parsed for node in path_from_root(forest, leaf))
        turns = list(filter(None, actions))
        reward_N[leaf] = KINDS[kind][1](record.answer or "", answers, turns)
    return reward_N


def recipe(settings: Settings) -> Recipe:
    """Returns groups of whole rollouts, normalized (GRPO), or single ones with a critic (PPO)."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(reward, kind=settings.system.kind),
        credit=shared_credit,  # with a critic, the reward of a rollout is that of each turn
        compare=over_rollouts,
        rollouts=settings.rollouts,
        metric="em",
        turn_credit=immediate_credit,
    )
