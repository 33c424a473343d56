"""OPERA: a plan of sub-goals, each searched, analysed and, where nothing was found, reworded.

Liu et al. 2026, "OPERA: A Reinforcement Learning-Enhanced Orchestrated Planner-Executor
Architecture for Reasoning-Oriented Multi-Hop Retrieval". Three roles with parameters of their own
learn one after the other (`mapgrpo.py`), each from a reward of its own (`rewards.py`).

Departures from the paper and its published code
  1. The paper states no limit: at most six steps (a plan that is cut to them counts as a fault),
     two rewritten queries a step, and always the same k, where the code searches deeper with every
     attempt.
  2. The last step's answer is the answer; the code asks for a synthesis and corrects answers by
     rules. A step that needs an answer that is not there fails, and the others go on.
  3. What is no plan becomes a plan of one step, the question; what is no verdict counts as `no`;
     where no query can be read the old one stays. Each is counted and costs reward.
  4. `code()`: the published scoring of plans, and the expert as in the published notes.
  5. The reward of a rewritten query needs its search, so the search of every query in a group is
     made. The paper does not say with which query or analysis of a group the rollout continues: it
     is the first one that the policy sampled, never the expert's, as the paper trains on what the
     policies' own actions lead to. `recipe.expert.carried=expert` continues with the expert's.
     Plans are all carried out, the expert's too, since their reward needs it: when all roles learn
     at once, the other roles also learn from the states that the expert's plan leads to.
  6. Trajectory memory is a view of the finished rollout (`memory.py`) and no part of the
     state; the placeholders are resolved from the answers so far.
  7. Algorithm 1's expert of an analysis is the best candidate for a sub-goal and its documents, and
     does not say for which documents it was scored. With others than these, only what can be right
     of these is taken: a `no`, or a `yes` whose answer stands in the prompt (`expert_pool.py`).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out
from jax_ragrl.credit.assign import over_rollouts, reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Done, Effect, Generate, Search
from jax_ragrl.rollout.expand import Expander
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.rollout.roles import Parsed, Role
from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.systems.base import Credit, Recipe, Reply
from jax_ragrl.systems.opera.expert_pool import load_pool
from jax_ragrl.systems.opera.grammar import (
    ANALYSIS,
    PLAN,
    REWRITE,
    YES,
    Step,
    filled,
    parse_analysis,
    parse_plan,
    parse_rewrite,
)
from jax_ragrl.systems.opera.mapgrpo import Expert, Groups, Injection, siblings_mean
from jax_ragrl.systems.opera.rewards import (
    GoldOf,
    SubGoal,
    analysis_reward,
    plan_reward,
    plan_reward_code,
    rewrite_reward,
    steps_gold,
)
from jax_ragrl.systems.opera.world import WorldExpert, world_gold
from jax_ragrl.text.metrics import exact_match
from jax_ragrl.text.prompts import numbered, user_turn
from jax_ragrl.types import Hits, Passage, Question, Sampling

PREVIEWS, PREVIEW_CHARACTERS = 3, 150  # what a rewriter sees of the failed search


# --- The state machine --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class State:
    """Where a rollout stands. `phase` names what it waits for.

    `answers` has one entry for every step that is over, empty where it failed; `goal` is the step
    in work with earlier answers in place, and `judged` the sub-goal that was analysed last, with
    the `candidates` that were shown for it. `faults` are malformed beside what a parser names: a
    plan that lost steps, the one with the answer among them.
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
    judged: SubGoal = SubGoal("", 0, 0)
    depth: int = 1
    answer: str | None = None
    why: str = ""
    faults: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Opera:
    """The system. `shared` lets all roles use one policy; the paper gives each its own.

    With `max_steps` 0 there is no planner: the question is the only sub-goal. With `max_rewrites` 0
    there is no rewriter.
    """

    style: str = "opera"
    top_k: int = 5
    max_steps: int = 6
    max_rewrites: int = 2
    temperature: float = 1.0
    max_tokens: tuple[int, int, int] = (512, 512, 256)
    shared: bool = False

    @property
    def roles(self) -> Mapping[str, Role]:
        """Plan, analysis and rewrite, in the order in which they are trained, as far as wanted."""
        parsers = {PLAN: parse_plan, ANALYSIS: parse_analysis, REWRITE: parse_rewrite}
        wanted = {PLAN: self.max_steps, ANALYSIS: 1, REWRITE: self.max_rewrites}
        return {
            name: Role(
                name,
                parse,
                Sampling(self.temperature, 1.0, tokens),
                policy="policy" if self.shared else name,
            )
            for (name, parse), tokens in zip(parsers.items(), self.max_tokens, strict=True)
            if wanted[name]
        }

    def start(self, question: Question) -> State:
        """A question without a plan, or, without a planner, its search."""
        if PLAN not in self.roles:
            return next_step(State(question, steps=(Step(question.text),)))
        return State(question)

    def wants(self, state: State) -> Effect:
        """What the state waits for."""
        match state.phase:
            case "plan":
                return self._generate(PLAN, state, (), question=state.question.text)
            case "search":
                return Search(state.query, self.top_k)
            case "analyse":
                return self._generate(ANALYSIS, state, state.candidates)
            case "rewrite":
                preview = [
                    p._replace(text=p.text[:PREVIEW_CHARACTERS])
                    for p in state.candidates[:PREVIEWS]
                ]
                return self._generate(REWRITE, state, tuple(preview))
            case _:
                return Done(state.answer, state.why)

    def advance(self, state: State, reply: Reply) -> State:
        """The state after a reply."""
        if isinstance(reply, Hits):
            return dataclasses.replace(
                state, phase="analyse", candidates=reply.passages, judged=_subgoal(state)
            )
        assert isinstance(reply, Parsed)
        state = dataclasses.replace(state, depth=state.depth + 1)
        after = {"plan": self._planned, "analyse": self._judged, "rewrite": self._rewritten}
        return after[state.phase](state, reply)

    def _planned(self, state: State, plan: Parsed) -> State:
        steps = plan.args if plan.valid else (Step(state.question.text),)
        faults = ("Cut Plan",) if len(steps) > self.max_steps else ()
        return next_step(dataclasses.replace(state, steps=steps[: self.max_steps], faults=faults))

    def _judged(self, state: State, verdict: Parsed) -> State:
        if verdict.action == YES:
            return next_step(_over(state, verdict.args[0], "answered"))
        if state.rewrites < self.max_rewrites:
            failure = verdict.thought or verdict.error
            return dataclasses.replace(state, phase="rewrite", failure=failure)
        return next_step(_over(state, "", "Out of Rewrites"))

    def _rewritten(self, state: State, parsed: Parsed) -> State:
        query = parsed.args[0] if parsed.args else state.query
        return dataclasses.replace(state, phase="search", query=query, rewrites=state.rewrites + 1)

    def _generate(
        self, role: str, state: State, shown: tuple[Passage, ...], **values: str
    ) -> Generate:
        values |= {"goal": state.goal, "query": state.query, "failure": state.failure}
        documents = numbered(self.style, shown)
        messages = user_turn(self.style, role, documents=documents, **values)
        return Generate(role, messages, state.depth)


def next_step(state: State) -> State:
    """The search of the next step whose needs are met, or the end: the last step's answer."""
    while len(state.answers) < len(state.steps):
        goal = filled(state.steps[len(state.answers)], state.answers)
        if goal is not None:
            return dataclasses.replace(state, phase="search", goal=goal, query=goal, rewrites=0)
        state = _over(state, "", "Missing Answer")
    return dataclasses.replace(state, phase="done", answer=state.answers[-1] or None)


def _subgoal(state: State) -> SubGoal:
    """The sub-goal in work."""
    return SubGoal(state.goal, len(state.answers), len(state.steps))


def _over(state: State, answer: str, why: str) -> State:
    return dataclasses.replace(state, answers=(*state.answers, answer), why=why)


# --- The recipe ---------------------------------------------------------------------------------

PLAN_REWARDS = {"paper": plan_reward, "code": plan_reward_code}
GOLD: Mapping[str, GoldOf] = {"steps": steps_gold, "world": world_gold}
ROLES = (PLAN, ANALYSIS, REWRITE)
WORLD = "world"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The choices of an OPERA run; the defaults are the paper's.

    `max_steps` and `max_rewrites` are as in `Opera`. A `group` of 1 tries nothing else at any
    decision: whole rollouts of a question (`config.rollouts` of them) are compared by their answers
    instead, which is the GRPO that the paper compares with, and takes no expert.
    `plan_reward` is `paper` or `code`, `least_steps` the plan length below which structure suffers,
    `ndcg_power` 1 leaves out the root. `gold` says where the gold of sub-goals comes from: the data
    set's `steps`, or the generated `world`. `pool` is a file of scored actions (`expert_pool.py`),
    or `world` for the rules of the generated encyclopedia.
    """

    style: str = "opera"
    top_k: int = 5
    max_steps: int = 6
    max_rewrites: int = 2
    temperature: float = 1.0
    max_tokens: tuple[int, int, int] = (512, 512, 256)
    shared: bool = False
    group: int = 8
    expert: Injection = Injection()
    pool: str = ""
    gold: str = "steps"
    plan_reward: str = "paper"
    least_steps: int = 2
    ndcg_power: float = 0.5

    def __post_init__(self) -> None:
        for name, choices in (("plan_reward", PLAN_REWARDS), ("gold", GOLD)):
            if getattr(self, name) not in choices:
                given, known = getattr(self, name), " or ".join(choices)
                raise UserError(f"recipe.{name} is {given!r}: use {known}")
        if unknown := sorted(set(self.expert.roles) - set(ROLES)):
            raise UserError(f"recipe.expert.roles names {unknown[0]!r}: use {', '.join(ROLES)}")
        if self.group < 1 or (self.group == 1 and self.expert.when != "off"):
            raise UserError(
                f"recipe.group is {self.group} with recipe.expert.when {self.expert.when!r}: use 2 "
                "or more; or 1, which compares whole rollouts, with recipe.expert.when=off"
            )
        if self.max_steps < 0 or self.max_rewrites < 0:
            raise UserError(
                f"recipe.max_steps is {self.max_steps} and recipe.max_rewrites {self.max_rewrites}"
                ": give at least 0, which leaves out the planner or the rewriter"
            )


def paper() -> Settings:
    """As the paper says."""
    return Settings()


def code() -> Settings:
    """As the code and its notes do: another rubric, and the expert in the planner's groups only."""
    notes = Injection("periodic", "worst", gradient=False, roles=(PLAN,))
    return Settings(plan_reward="code", expert=notes)


def reward(forest: Forest, settings: Settings) -> np.ndarray:
    """Each action's reward by its role, and exact match on the leaves, float32 `[N]`.

    A plan's execution is what the rollouts that carry it out earn.
    """
    reward_N = answer_rewards(forest, exact_match)
    success_N, _ = reachable_leaves(forest, reward_N)
    for node, record in enumerate(forest.records):
        if record.action is not None:
            reward_N[node] = _role_reward(forest, record, float(success_N[node]), settings)
    return reward_N


def _role_reward(forest: Forest, record: Record, success: float, settings: Settings) -> float:
    question, parsed, state = forest.questions[record.question], record.parsed, record.state
    assert parsed is not None
    gold_of = GOLD[settings.gold]
    if record.role == PLAN:
        plan = PLAN_REWARDS[settings.plan_reward]
        return plan(question.text, parsed, success, settings.least_steps)
    if record.role == ANALYSIS:
        return analysis_reward(parsed, gold_of(question, state.judged, state.candidates))
    gold = gold_of(question, _subgoal(state), record.found)
    return rewrite_reward(parsed, gold, settings.ndcg_power)


@functools.cache
def expert_of(settings: Settings) -> Expert | None:
    """The expert that the settings name; None where none is wanted.

    Raises:
      UserError: an expert is wanted and there is no pool.
    """
    if settings.expert.when == "off":
        return None
    if not settings.pool:
        raise UserError(
            f"recipe.expert.when is {settings.expert.when!r}, but there is no pool of scored "
            "actions: name its file in recipe.pool, or set recipe.expert.when=off"
        )
    if settings.pool == WORLD:
        return WorldExpert(settings.style)
    return load_pool(pathlib.Path(settings.pool))


def over_answers(
    forest: Forest, reward_N: np.ndarray, rule: Callable[..., Any]
) -> tuple[np.ndarray, np.ndarray]:
    """`over_rollouts` by the answers alone: the rewards of actions are of MAPGRPO's groups."""
    return over_rollouts(forest, np.where(forest.leaf_N, reward_N, 0), rule)


OVER_ANSWERS: Mapping[str, Credit] = {
    rule.__name__: functools.partial(over_answers, rule=rule)
    for rule in (group_normalised, group_centred, leave_one_out)
}


def groups(trained: frozenset[str], settings: Settings) -> Expander:
    """The groups of the roles in training. Plans are all carried out, queries all searched."""
    whole, peeked = frozenset((PLAN,)), frozenset((REWRITE,))
    return Groups(trained, settings.group, settings.expert, expert_of(settings), whole, peeked)


def recipe(settings: Settings) -> Recipe:
    """MAPGRPO: groups of one role's decisions, its own reward, centred within the group.

    `objective.advantage=group_normalised` divides by the deviation of the group, as GRPO does.
    """
    system = Opera(
        settings.style,
        settings.top_k,
        settings.max_steps,
        settings.max_rewrites,
        settings.temperature,
        settings.max_tokens,
        settings.shared,
    )
    earned = functools.partial(reward, settings=settings)
    if settings.group == 1:
        by_answers = OVER_ANSWERS["group_normalised"]
        return Recipe(system, earned, by_answers, metric="em", advantages=OVER_ANSWERS)
    credit = functools.partial(siblings_mean, injection=settings.expert)
    normalised = functools.partial(credit, normalised=True)
    return Recipe(
        system,
        earned,
        credit,
        functools.partial(groups, settings=settings),
        metric="em",
        width=settings.group,
        advantages={"group_centred": credit, "group_normalised": normalised},
    )
