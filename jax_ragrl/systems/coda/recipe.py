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
  5. `paper()`: the executors share one point for format, and their refined texts are joined;
     `code()`: each executor is judged separately (the mean for format, any for refinement). Without
     an executor neither gives that point. The format of a planner is the code's: think, task and
     answer. So is that of an executor: think, search, refine and answer, all required; eq. 6 names
     only task and answer, search and result. So the reward of `paper()` is the code's with another
     rule for several executors.
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

import numpy as np

from jax_ragrl.config.ranges import Count, NotNegative
from jax_ragrl.credit.assign import over_rollouts
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.systems.base import Recipe, check_group_size, records_from_root
from jax_ragrl.systems.coda.rewards import (
    EXECUTOR_TAGS,
    answer_reward,
    format_reward,
    refine_reward,
    role_texts,
)
from jax_ragrl.systems.coda.system import CoDA
from jax_ragrl.systems.tags import REFINE


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


def paper() -> Settings:
    """The choices of the paper; the weight 0.5 of the refinement is the code's."""
    return Settings()


def code() -> Settings:
    """The choices of the code: nucleus sampling in training, each executor judged separately."""
    return Settings(CoDA(top_p=0.95), joint_executor_reward=False)


def terms(forest: Forest, settings: Settings) -> dict[str, np.ndarray]:
    """Returns the summands of the reward on each leaf (eq. 9) by name, float64 `[N]`."""
    refinement, together = settings.system.refinement, settings.joint_executor_reward
    # An executor that is not asked to refine does not need the tag.
    tags = [tag for tag in EXECUTOR_TAGS if refinement or tag != REFINE]
    summands = {name: np.zeros(len(forest.records)) for name in ("answer", "format", "refine")}
    for leaf in np.flatnonzero(forest.leaf_N).tolist():
        record = forest.records[leaf]
        answers = forest.questions[record.question].answers
        planner, executors = role_texts(records_from_root(forest, leaf))
        hit = refinement and refine_reward(executors, answers, together)
        form = format_reward(planner, executors, together, tags)
        summands["answer"][leaf] = answer_reward(record.answer, answers)
        summands["format"][leaf] = settings.format_weight * form
        # The weights are part of the terms, so that the metrics add up to the reward.
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
    """Returns the system for `ragrl evaluate`.

    Args:
      style: the prompt style.
      top_k: passages per search.
      tiny: whether the policy is the model that ships with the package.
    """
    # The tiny policy learned observations as chat turns; a base model reads plain text.
    return CoDA(style, top_k, as_chat_turns=tiny)
