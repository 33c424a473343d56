"""OPERA's state machine; `recipe.py` lists the departures from the paper."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Done, Effect, Generate, Search
from jax_ragrl.rollout.roles import ParsedAction, Role
from jax_ragrl.rollout.system import Reply
from jax_ragrl.rollout.system import State as BaseState
from jax_ragrl.systems.opera.grammar import (
    ANALYSIS,
    PLAN,
    REWRITE,
    YES,
    Step,
    fill_placeholders,
    parse_analysis,
    parse_plan,
    parse_rewrite,
)
from jax_ragrl.systems.opera.rewards import SubGoal
from jax_ragrl.systems.opera.strict import strict_grammars
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import Hits, Passage, Question, Sampling

ROLES = (PLAN, ANALYSIS, REWRITE)
PREVIEWS, PREVIEW_CHARACTERS = 3, 150  # how much of the failed search a rewriter sees


# --- The state machine --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class State(BaseState):
    """The state of a rollout. `phase` names the next effect.

    Fields:
      steps: the steps of the plan.
      answers: one entry per finished step; empty if the step failed.
      goal: the current sub-goal with earlier answers filled in.
      query: the latest query of the current step.
      rewrites: the number of rewritten queries of the current step.
      failure: the latest analysis without an answer, which the rewriter reads.
      candidates: the passages of the latest search.
      analyzed_goal: the sub-goal of the latest search, which the next analysis judges.
      finish_reason: the outcome of the latest finished step, at the end that of the rollout.
      faults: faults that no parser names: a plan that was cut, so that its last step, which gives
        the answer, is missing.
    """

    question: Question
    phase: str = "plan"
    steps: tuple[Step, ...] = ()
    answers: tuple[str, ...] = ()
    goal: str = ""
    query: str = ""
    rewrites: int = 0
    failure: str = ""
    candidates: tuple[Passage, ...] = ()
    analyzed_goal: SubGoal = SubGoal("", 0, 0)
    depth: int = 1
    answer: str | None = None
    finish_reason: str = ""
    faults: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Opera:
    """The system, and the config section `recipe.system`.

    Fields:
      style: the folder of the prompts.
      top_k: passages per search.
      max_plan_steps: longer plans are cut. With 0 there is no planner: the question is the only
        sub-goal.
      max_rewrites: rewritten queries per sub-goal. With 0 there is no rewriter.
      temperature: the sampling temperature of all roles.
      max_tokens: most new tokens of a plan, an analysis and a rewritten query.
      shared_policy: all roles use one policy; the paper gives each role its own.
    """

    style: str = "opera"
    top_k: int = 5
    max_plan_steps: int = 6
    max_rewrites: int = 2
    temperature: float = 1.0
    max_tokens: tuple[int, int, int] = (512, 512, 256)
    shared_policy: bool = False

    def __post_init__(self) -> None:
        if self.max_plan_steps < 0 or self.max_rewrites < 0:
            raise UserError(
                f"recipe.system.max_plan_steps is {self.max_plan_steps} and recipe.system."
                f"max_rewrites {self.max_rewrites}: give at least 0, which leaves out the planner "
                "or the rewriter"
            )

    @property
    def roles(self) -> Mapping[str, Role]:
        """Plan, analysis and rewrite in the order of training, without roles that are off."""
        parsers = {PLAN: parse_plan, ANALYSIS: parse_analysis, REWRITE: parse_rewrite}
        # A role with a limit of 0 is off.
        uses = {PLAN: self.max_plan_steps, ANALYSIS: 1, REWRITE: self.max_rewrites}
        regexes = strict_grammars(self.max_plan_steps)
        return {
            name: Role(
                name,
                parse,
                Sampling(self.temperature, 1.0, tokens),
                policy="policy" if self.shared_policy else name,
                action_regex=regexes[name],
            )
            for (name, parse), tokens in zip(parsers.items(), self.max_tokens, strict=True)
            if uses[name]
        }

    def start(self, question: Question) -> State:
        """Returns the state before the plan or, without a planner, before the question's search."""
        # The question itself is the only step.
        if PLAN not in self.roles:
            return next_step(State(question, steps=(Step(question.text),)))
        return State(question)

    def next_effects(self, state: State) -> Effect:
        """Returns the effect of the phase."""
        match state.phase:
            case "plan":
                return self._generate(PLAN, state, (), question=state.question.text)
            case "search":
                return Search(state.query, self.top_k)
            case "analyse":
                return self._generate(ANALYSIS, state, state.candidates)
            case "rewrite":
                return self._generate(REWRITE, state, _previews(state.candidates))
            case _:
                return Done(state.answer, state.finish_reason)

    def advance(self, state: State, reply: Reply) -> State:
        """Returns the state after a reply."""
        if isinstance(reply, Hits):
            goal = current_subgoal(state)
            return dataclasses.replace(
                state, phase="analyse", candidates=reply.passages, analyzed_goal=goal
            )
        assert isinstance(reply, ParsedAction)
        state = dataclasses.replace(state, depth=state.depth + 1)
        transitions = {
            "plan": self._after_plan,
            "analyse": self._after_analysis,
            "rewrite": self._after_rewrite,
        }
        return transitions[state.phase](state, reply)

    def _after_plan(self, state: State, plan: ParsedAction) -> State:
        steps = plan.args if plan.valid else (Step(state.question.text),)
        faults = ("Cut Plan",) if len(steps) > self.max_plan_steps else ()
        steps = steps[: self.max_plan_steps]
        return next_step(dataclasses.replace(state, steps=steps, faults=faults))

    def _after_analysis(self, state: State, verdict: ParsedAction) -> State:
        if verdict.action == YES:
            return next_step(_finish_step(state, verdict.args[0], "answered"))
        # The rewriter reads why the search failed: the analysis, or the parse error.
        if state.rewrites < self.max_rewrites:
            failure = verdict.thought or verdict.error
            return dataclasses.replace(state, phase="rewrite", failure=failure)
        return next_step(_finish_step(state, "", "Out of Rewrites"))

    def _after_rewrite(self, state: State, rewriting: ParsedAction) -> State:
        # Without a readable query the previous one is searched again.
        query = rewriting.args[0] if rewriting.args else state.query
        return dataclasses.replace(state, phase="search", query=query, rewrites=state.rewrites + 1)

    def _generate(
        self, role: str, state: State, passages: tuple[Passage, ...], **values: str
    ) -> Generate:
        values |= {"goal": state.goal, "query": state.query, "failure": state.failure}
        documents = format_passages(self.style, passages)
        messages = user_turn(self.style, role, documents=documents, **values)
        return Generate(role, messages, state.depth)


def next_step(state: State) -> State:
    """Returns the state before the search of the next step, or the end with the last answer.

    A step that needs a missing answer fails without a search, and the next one is tried.
    """
    while len(state.answers) < len(state.steps):
        goal = fill_placeholders(state.steps[len(state.answers)], state.answers)
        if goal is not None:
            return dataclasses.replace(state, phase="search", goal=goal, query=goal, rewrites=0)
        state = _finish_step(state, "", "Missing Answer")
    # The answer of the last step is that of the question; an empty one is missing.
    return dataclasses.replace(state, phase="done", answer=state.answers[-1] or None)


def current_subgoal(state: State) -> SubGoal:
    """Returns the sub-goal of the current step."""
    return SubGoal(state.goal, len(state.answers), len(state.steps))


def _finish_step(state: State, answer: str, reason: str) -> State:
    return dataclasses.replace(state, answers=(*state.answers, answer), finish_reason=reason)


def _previews(passages: tuple[Passage, ...]) -> tuple[Passage, ...]:
    return tuple(p._replace(text=p.text[:PREVIEW_CHARACTERS]) for p in passages[:PREVIEWS])
