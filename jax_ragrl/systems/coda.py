"""CoDA's table of choices: groups of rollouts, one reward and one advantage per rollout (PECO).

"CoDA: A Context-Decoupled Hierarchical Agent with Reinforcement Learning" (WSDM 2026). The planner
delegates sub-questions and sees only their results. An executor sees only its sub-question and the
passages of its searches. One reward for the complete rollout trains every turn of both.

Departures from the paper and its published code
  1. Turns are cut by token ids, at the shortest prefix that contains a closing tag; the code
     decodes, cuts and encodes again, so that it scores other ids than were sampled.
  2. Observations are never cut; the code keeps 512 tokens of each (1,024 in evaluation). A context
     that no longer fits the sampler ends its rollout (an executor's: with an empty result); the
     code drops its beginning.
  3. Tasks and searches in the last turn are not carried out, since no turn could read the outcome.
  4. An empty action is refused like a missing one: a message, and one turn less.
  5. The executors share one point for format, and their refined texts are joined; in the code (the
     preset `code` of the config) each is judged separately (the mean for format, any for
     refinement). Without an executor neither gives that point. The format of a planner is the
     code's: think, task and answer. So is that of an executor: think, search, refine and answer,
     all required; eq. 6 names only task and answer, search and result. So the reward is the code's
     with another rule for several executors. The weight 0.5 of the refinement is the code's.
  6. The instructions pass through the chat template; without `as_chat_turns` (as in the paper) the
     text after them is one long turn of the assistant.
  7. Groups are questions of the batch; with the row numbers of the code, two data sets may share a
     group.
  8. The loss of `configs/coda.py` is a mean over tokens; the paper sums over trajectories.
  9. Evaluation is greedy and uses the last checkpoint; the code samples, and selects the checkpoint
     by the training reward.
 10. A refined text contains a gold answer if it contains its tokens; by substring (paper and code)
     "North" contains the answer "no".
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from jax_ragrl.config.ranges import Count, NotNegative, Positive, Probability
from jax_ragrl.credit.assign import over_rollouts
from jax_ragrl.rollout.effects import Done
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import Fault, Steps
from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.systems import tags
from jax_ragrl.systems.base import Recipe, check_group_size, path_from_root
from jax_ragrl.systems.tags import ANSWER, REFINE, SEARCH, TASK, THINK
from jax_ragrl.text.metrics import cover_match_tokens, f1
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import Question, Sampling

PLANNER, EXECUTOR = "planner", "executor"
PLANNER_ACTIONS, EXECUTOR_ACTIONS = (TASK, ANSWER), (SEARCH, ANSWER)
EXECUTOR_NOTES = (THINK, REFINE)  # of a turn in a strict grammar
# The tags that each role must have written at least once, opened as often as closed.
PLANNER_TAGS, EXECUTOR_TAGS = (THINK, TASK, ANSWER), (THINK, SEARCH, REFINE, ANSWER)


@dataclasses.dataclass(frozen=True)
class CoDA:
    """The system, and the config section `recipe.system`.

    Fields:
      style: the folder of the prompts.
      top_k: passages per search.
      max_turns: turns of the planner.
      max_executor_turns: turns of each executor.
      max_tokens, temperature, top_p: how each turn is sampled.
      as_chat_turns: observations are chat turns of the user, not plain text.
      refinement: executors are asked to refine the passages of a search. Without it they are
        Search-R1's agent in the hierarchy (table 3).
    """

    FAULTS = tags.TAG_FAULTS

    style: str = "coda"
    top_k: Count = 3
    max_turns: Count = 6
    max_executor_turns: Count = 6
    max_tokens: Count = 512
    temperature: Positive = 1.0
    top_p: Probability = 1.0
    as_chat_turns: bool = False
    refinement: bool = True

    @property
    def roles(self) -> Mapping[str, Role]:
        """Planner and executor, which share one policy and differ only in their tags."""
        how = Sampling(self.temperature, self.top_p, self.max_tokens), self.as_chat_turns
        return {
            PLANNER: tags.turn_role(PLANNER, PLANNER_ACTIONS, (THINK,), *how),
            EXECUTOR: tags.turn_role(EXECUTOR, EXECUTOR_ACTIONS, EXECUTOR_NOTES, *how),
        }

    def steps(self, question: Question) -> Steps:
        """The planner delegates tasks until it answers."""
        prompt = user_turn(self.style, "planner", question=question.text)
        planner = tags.converse(PLANNER, prompt, self.max_turns, self._delegate)
        answer, reason, depth = yield from planner
        yield Done(answer or None, reason, depth)

    def _delegate(self, action: ParsedAction, depth: int) -> Steps:
        """A new executor searches for the task of a planner; see `tags.Observe`."""
        if action.action != TASK:
            return tags.observation(self.style, "retry_planner", self.as_chat_turns), depth
        # An executor sees its task, never the question of the planner.
        name = "executor" if self.refinement else "search"
        prompt = user_turn(self.style, name, task=action.args[0])
        search = functools.partial(tags.search_passages, self.style, self.top_k, self.as_chat_turns)
        executor = tags.converse(EXECUTOR, prompt, self.max_executor_turns, search, depth)
        result, reason, depth = yield from executor
        # The planner sees the result only, which is empty if the executor ended without an answer.
        if not result:
            yield Fault(f"Executor {reason}")
        return tags.observation(self.style, "result", self.as_chat_turns, result=result), depth


# --- Rewards ------------------------------------------------------------------------------------


def role_texts(path: Sequence[Record]) -> tuple[str, list[str]]:
    """Returns the text of a rollout's planner, and of each executor, without observations.

    Consecutive executor turns belong to one executor: the planner acts between two of them.
    """
    runs = itertools.groupby((r for r in path if r.parsed), key=lambda record: record.role)
    texts = [(role, "\n".join(r.parsed.text for r in run if r.parsed)) for role, run in runs]
    planner = "\n".join(text for role, text in texts if role == PLANNER)
    return planner, [text for role, text in texts if role == EXECUTOR]


def answer_reward(answer: str | None, answers: Sequence[str]) -> float:
    """Returns R_ans = 6 F1 - 3 (eq. 4 and 5); a missing answer counts as a wrong one."""
    return 6.0 * (0.0 if answer is None else f1(answer, answers)) - 3.0


def format_reward(
    planner: str, executors: Sequence[str], together: bool, own_tags: Sequence[str] = EXECUTOR_TAGS
) -> float:
    """Returns R_format = I_P + I_E (eq. 6) of the texts of a planner and its executors.

    An answer without any task costs the planner's point. If `together`, I_E says that all executors
    have written `own_tags`; otherwise it is the share that has.
    """
    well_formed = [tags.tags_match(text, own_tags) for text in executors] or [False]
    share = float(all(well_formed)) if together else float(np.mean(well_formed))
    return float(tags.tags_match(planner, PLANNER_TAGS)) + share


def refine_reward(executors: Sequence[str], answers: Sequence[str], together: bool) -> float:
    """Returns I(s != "") I(G in s) (eq. 7 and 8): the refined text contains the tokens of a gold.

    If `together`, `s` joins the refined texts of all executors; otherwise that of any may do.
    """
    texts = [tags.tag_contents(text, REFINE) for text in executors]
    texts = [" ".join(texts)] if together else texts
    return float(any(cover_match_tokens(s, answers) for s in texts if s.strip()))


# --- The table of choices -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Settings:
    """The config section `recipe`; the defaults are the paper's.

    Fields:
      system: the steps and how actions are sampled.
      rollouts: rollouts per question, which are compared with each other.
      format_weight: weight of the format reward; 0 removes it.
      refinement_weight: weight of the refinement reward; 0 removes it. An agent without
        `system.refinement` earns none.
      joint_executor_reward: all executors of a rollout are judged as one text; otherwise each is
        judged separately (departure 5).
    """

    system: CoDA = CoDA()
    rollouts: Count = 8
    format_weight: NotNegative = 1.0
    refinement_weight: NotNegative = 0.5
    joint_executor_reward: bool = True

    def __post_init__(self) -> None:
        check_group_size("rollouts", self.rollouts)


def terms(forest: Forest, settings: Settings) -> dict[str, np.ndarray]:
    """Returns the summands of the reward on each leaf (eq. 9) by name, float64 `[N]`."""
    refinement, together = settings.system.refinement, settings.joint_executor_reward
    # An executor that is not asked to refine does not need the tag.
    own_tags = [tag for tag in EXECUTOR_TAGS if refinement or tag != REFINE]
    summands = {name: np.zeros(len(forest.records)) for name in ("answer", "format", "refine")}
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        record = forest.records[leaf]
        answers = forest.questions[record.question].answers
        path = [forest.records[node] for node in path_from_root(forest, leaf)]
        planner, executors = role_texts(path)
        hit = refinement and refine_reward(executors, answers, together)
        form = format_reward(planner, executors, together, own_tags)
        summands["answer"][leaf] = answer_reward(record.answer, answers)
        # The weights are part of the terms, so that the metrics add up to the reward.
        summands["format"][leaf] = settings.format_weight * form
        summands["refine"][leaf] = settings.refinement_weight * hit
    return summands


def reward(forest: Forest, settings: Settings) -> np.ndarray:
    """Returns R = R_ans + R_format + 0.5 R_refine (eq. 9) on each leaf, float32 `[N]`."""
    answer_N, format_N, refine_N = terms(forest, settings).values()
    return (answer_N + format_N + refine_N).astype(np.float32)


def recipe(settings: Settings) -> Recipe:
    """Returns groups of rollouts with one advantage for every turn of a rollout."""
    return Recipe(
        system=settings.system,
        reward=functools.partial(reward, settings=settings),
        # A_i = (R_i - mean_j R_j) / std_j R_j over the rollouts j of the same question (eq. 2), the
        # same number for every turn, independent of the number of tasks in a rollout.
        compare=over_rollouts,
        rollouts=settings.rollouts,
        metric="em",
        reward_terms=functools.partial(terms, settings=settings),
    )


def table_system(style: str, top_k: int, *, tiny: bool) -> CoDA:
    """Returns the system for `ragrl evaluate`, see `systems.registry`."""
    # The tiny policy learned observations as chat turns; a base model reads plain text.
    return CoDA(style, top_k, as_chat_turns=tiny)
