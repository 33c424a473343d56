"""CoDA's grammar and steps; `recipe.py` lists the departures from the paper."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jax_ragrl.config.ranges import Count, Positive, Probability
from jax_ragrl.rollout.effects import Done
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import Fault, Steps
from jax_ragrl.systems import tags
from jax_ragrl.systems.tags import ANSWER, REFINE, SEARCH, TAG_FAULTS, TASK, THINK
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.types import Question, Sampling

PLANNER, EXECUTOR = "planner", "executor"
PLANNER_ACTIONS, EXECUTOR_ACTIONS = (TASK, ANSWER), (SEARCH, ANSWER)
EXECUTOR_NOTES = (THINK, REFINE)  # of a turn in a strict grammar

# The roles differ only in the tags of their actions.
parse_planner = functools.partial(tags.parse_turn, actions=PLANNER_ACTIONS)
parse_executor = functools.partial(tags.parse_turn, actions=EXECUTOR_ACTIONS)


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

    FAULTS = TAG_FAULTS

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
        """Planner and executor, which share one policy."""
        sampling = Sampling(self.temperature, self.top_p, self.max_tokens)
        return {
            name: Role(
                name,
                functools.partial(tags.parse_turn, actions=actions),
                sampling,
                stop_strings=tags.stop_strings(actions),
                as_chat_turns=self.as_chat_turns,
                reads_thoughts=True,
                action_regex=tags.turn_regex(actions, notes),
            )
            for name, actions, notes in (
                (PLANNER, PLANNER_ACTIONS, (THINK,)),
                (EXECUTOR, EXECUTOR_ACTIONS, EXECUTOR_NOTES),
            )
        }

    def steps(self, question: Question) -> Steps:
        """The planner delegates tasks until it answers."""
        prompt = user_turn(self.style, "planner", question=question.text)
        answer, reason, depth = yield from tags.converse(
            PLANNER, prompt, self.max_turns, self._delegate
        )
        yield Done(answer or None, reason, depth)

    def _delegate(self, action: ParsedAction, depth: int) -> Steps:
        """A new executor searches for the task of a planner; see `tags.Observe`."""
        if action.action != TASK:
            return tags.observation(self.style, "retry_planner", self.as_chat_turns), depth
        # An executor sees its task, never the question of the planner.
        prompt = "executor" if self.refinement else "search"
        messages = user_turn(self.style, prompt, task=action.args[0])
        search = functools.partial(tags.search_passages, self.style, self.top_k, self.as_chat_turns)
        result, reason, depth = yield from tags.converse(
            EXECUTOR, messages, self.max_executor_turns, search, depth
        )
        # The planner sees the result only, which is empty if the executor ended without an answer.
        if not result:
            yield Fault(f"Executor {reason}")
        return tags.observation(self.style, "result", self.as_chat_turns, result=result), depth
