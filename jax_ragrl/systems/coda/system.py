"""CoDA's grammar and state machine; `recipe.py` lists the departures from the paper."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from jax_ragrl.rollout.effects import Done, Effect, Generate, Search
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import Reply
from jax_ragrl.rollout.system import State as BaseState
from jax_ragrl.systems.tags import (
    ANSWER,
    REFINE,
    SEARCH,
    TASK,
    THINK,
    Conversation,
    SearchLoop,
    parse_turn,
    stop_strings,
    turn_regex,
)
from jax_ragrl.text.prompts import format_passages, template, user_turn
from jax_ragrl.types import Hits, Passage, Question, Sampling

PLANNER, EXECUTOR = "planner", "executor"
PLANNER_ACTIONS, EXECUTOR_ACTIONS = (TASK, ANSWER), (SEARCH, ANSWER)
EXECUTOR_NOTES = (THINK, REFINE)  # of a turn in a strict grammar

# The roles differ only in the tags of their actions.
parse_planner = functools.partial(parse_turn, actions=PLANNER_ACTIONS)
parse_executor = functools.partial(parse_turn, actions=EXECUTOR_ACTIONS)


# --- The state machine --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class State(BaseState):
    """The conversation of the planner, and the executor that works on its latest task.

    Fields:
      executor: the search loop of the active executor; None while the planner acts.
      candidates: the passages of the latest search.
      finish_reason: why the rollout ended; empty before.
      faults: the reasons of executors that ended without an answer.
    """

    question: Question
    planner: Conversation
    executor: SearchLoop | None = None
    candidates: tuple[Passage, ...] = ()
    depth: int = 1
    answer: str | None = None
    finish_reason: str = ""
    faults: tuple[str, ...] = ()


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

    style: str = "coda"
    top_k: int = 3
    max_turns: int = 6
    max_executor_turns: int = 6
    max_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 1.0
    as_chat_turns: bool = False
    refinement: bool = True

    @property
    def roles(self) -> Mapping[str, Role]:
        """Planner and executor, which share one policy."""
        return {
            PLANNER: self._role(PLANNER, parse_planner, PLANNER_ACTIONS),
            EXECUTOR: self._role(EXECUTOR, parse_executor, EXECUTOR_ACTIONS),
        }

    def start(self, question: Question) -> State:
        """Returns the state of the planner with the question."""
        return State(question, Conversation(question.text))

    def next_effects(self, state: State) -> Effect:
        """Returns the next effect; an active executor comes before the planner."""
        if state.finish_reason:
            return Done(state.answer, state.finish_reason)
        if state.executor is None:
            messages = user_turn(self.style, "planner", question=state.planner.about)
            return Generate(PLANNER, messages, state.depth, state.planner.history)
        if state.executor.query:
            return Search(state.executor.query, self.top_k)
        # An executor sees its task, never the question of the planner.
        conversation = state.executor.conversation
        prompt = "executor" if self.refinement else "search"
        messages = user_turn(self.style, prompt, task=conversation.about)
        return Generate(EXECUTOR, messages, state.depth, conversation.history)

    def advance(self, state: State, reply: Reply) -> State:
        """Returns the state after an action or a search."""
        if isinstance(reply, Hits):
            assert state.executor is not None, "only executors search"
            text = self._observe("documents", documents=format_passages(self.style, reply.passages))
            executor = state.executor.after_search(text)
            return dataclasses.replace(state, executor=executor, candidates=reply.passages)
        assert isinstance(reply, ParsedAction)
        state = dataclasses.replace(state, depth=state.depth + 1)
        if state.executor is None:
            return self._after_planner(state, reply)
        return self._after_executor(state, state.executor, reply)

    def _after_executor(self, state: State, executor: SearchLoop, action: ParsedAction) -> State:
        retry = self._observe("retry_executor")
        executor = executor.after_action(action, self.max_executor_turns, retry)
        if not executor.finish_reason:
            return dataclasses.replace(state, executor=executor)
        # The planner sees the result only, which is empty if the executor ended without an answer.
        planner = state.planner.with_observation(self._observe("result", result=executor.result))
        faults = () if executor.result else (f"Executor {executor.finish_reason}",)
        faults = (*state.faults, *faults)
        return dataclasses.replace(state, planner=planner, executor=None, faults=faults)

    def _after_planner(self, state: State, action: ParsedAction) -> State:
        planner = state.planner.with_action(action)
        state = dataclasses.replace(state, planner=planner)
        if action.action == ANSWER:
            return dataclasses.replace(state, answer=action.args[0], finish_reason="answered")
        # A task in the last turn is not carried out: no turn is left to read its result.
        if not action.ids or planner.turns >= self.max_turns:
            reason = "Out of Turns" if action.ids else action.error
            return dataclasses.replace(state, finish_reason=reason)
        if action.action == TASK:
            return dataclasses.replace(state, executor=SearchLoop(Conversation(action.args[0])))
        planner = planner.with_observation(self._observe("retry_planner"))
        return dataclasses.replace(state, planner=planner)

    def _observe(self, name: str, **values: str) -> str:
        return observation(self.style, name, self.as_chat_turns, **values)

    def _role(
        self, name: str, parse: functools.partial[ParsedAction], actions: Sequence[str]
    ) -> Role:
        sampling = Sampling(self.temperature, self.top_p, self.max_tokens)
        return Role(
            name,
            parse,
            sampling,
            stop_strings=stop_strings(actions),
            as_chat_turns=self.as_chat_turns,
            reads_thoughts=True,
            action_regex=turn_regex(actions, EXECUTOR_NOTES if name == EXECUTOR else (THINK,)),
        )


def observation(style: str, name: str, chat: bool, **values: str) -> str:
    """Returns the text of an observation.

    Args:
      style: the prompt style.
      name: the name of the prompt.
      chat: whether observations are chat turns of the user; otherwise they are separate lines in
        the turn of the assistant.
      values: the values of the placeholders in the prompt.
    """
    text = template(style, name).substitute(values)
    return text if chat else f"\n{text}\n"
