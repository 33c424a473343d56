"""OPERA's steps; `recipe.py` lists the departures from the paper."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from jax_ragrl.config.ranges import Count, Natural, Positive
from jax_ragrl.rollout.effects import Done, Generate, Search
from jax_ragrl.rollout.roles import Role
from jax_ragrl.rollout.system import Fault, Shown, Steps
from jax_ragrl.systems.opera import grammar
from jax_ragrl.systems.opera.grammar import ANALYSIS, PLAN, REWRITE, YES, Step, fill_placeholders
from jax_ragrl.systems.opera.rewards import SubGoal
from jax_ragrl.text.prompts import format_passages, user_turn
from jax_ragrl.types import Passage, Question, Sampling

ROLES = (PLAN, ANALYSIS, REWRITE)
PREVIEWS, PREVIEW_CHARACTERS = 3, 150  # how much of the failed search a rewriter sees


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

    FAULTS = {
        "No Plan": "The text holds no list of sub-goals.",
        "Cut Plan": "The plan has more steps than the system accepts, so its end was cut.",
        "No Status": "The analysis does not say whether the documents suffice.",
        "No JSON": "The query is not in a JSON object.",
        "Empty Query": "The rewritten query holds no text.",
        "Out of Rewrites": "Every rewritten query of a sub-goal failed.",
        "Missing Answer": "A sub-goal needs the answer of an earlier one that failed.",
    }

    style: str = "opera"
    top_k: Count = 5
    max_plan_steps: Natural = 6
    max_rewrites: Natural = 2
    temperature: Positive = 1.0
    max_tokens: tuple[Count, Count, Count] = (512, 512, 256)
    shared_policy: bool = False

    @property
    def roles(self) -> Mapping[str, Role]:
        """Plan, analysis and rewrite in the order of training, without roles that are off."""
        parsers = (grammar.parse_plan, grammar.parse_analysis, grammar.parse_rewrite)
        uses = {PLAN: self.max_plan_steps, ANALYSIS: 1, REWRITE: self.max_rewrites}
        regexes, roles = grammar.strict_grammars(self.max_plan_steps), {}
        for name, parse, tokens in zip(ROLES, parsers, self.max_tokens, strict=True):
            sampling = Sampling(self.temperature, 1.0, tokens)
            policy = "policy" if self.shared_policy else name
            if uses[name]:
                roles[name] = Role(name, parse, sampling, policy, action_regex=regexes[name])
        return roles

    def steps(self, question: Question) -> Steps:
        """Plans, then searches, analyses and rewrites for each sub-goal; the last answer counts."""
        # Without a planner, or without a plan, the question itself is the only step.
        plan: tuple[Step, ...] = (Step(question.text),)
        depth = 1
        if self.max_plan_steps:
            reply = yield self._generate(PLAN, depth, (), question=question.text)
            depth += 1
            plan = reply.args if reply.valid else plan
            # The last step, which gives the answer, is missing in a plan that is cut.
            if len(plan) > self.max_plan_steps:
                yield Fault("Cut Plan")
            plan = plan[: self.max_plan_steps]
        answers: list[str] = []
        reason = ""
        for step in plan:
            goal = fill_placeholders(step, answers)
            # A step that needs a missing answer fails without a search, and the next one is tried.
            if goal is None:
                answer, reason = "", "Missing Answer"
            else:
                subgoal = SubGoal(goal, len(answers), len(plan))
                answer, reason, depth = yield from self._pursue(subgoal, depth)
            answers.append(answer)
        # The answer of the last step is that of the question; an empty one is missing.
        yield Done(answers[-1] or None, reason, depth)

    def _pursue(self, subgoal: SubGoal, depth: int) -> Steps:
        """Searches until an analysis has the answer; returns it (or ''), the outcome and depth."""
        query = subgoal.text
        for rewrites in itertools.count():
            passages = (yield Search(query, self.top_k)).passages
            yield Shown(passages)
            # The rewards of the actions after a search judge them by its sub-goal.
            yield subgoal
            values = {"goal": subgoal.text, "query": query}
            verdict = yield self._generate(ANALYSIS, depth, passages, **values)
            depth += 1
            if verdict.action == YES:
                return verdict.args[0], "answered", depth
            if rewrites == self.max_rewrites:
                return "", "Out of Rewrites", depth
            # The rewriter reads why the search failed: the analysis, or the parse error.
            values["failure"] = verdict.thought or verdict.error
            rewriting = yield self._generate(REWRITE, depth, previews(passages), **values)
            depth += 1
            # Without a readable query the previous one is searched again.
            query = rewriting.args[0] if rewriting.args else query

    def _generate(
        self, role: str, depth: int, passages: tuple[Passage, ...], **values: str
    ) -> Generate:
        values = {"goal": "", "query": "", "failure": ""} | values
        documents = format_passages(self.style, passages)
        return Generate(role, user_turn(self.style, role, documents=documents, **values), depth)


def previews(passages: tuple[Passage, ...]) -> tuple[Passage, ...]:
    """Returns what a rewriter sees of the passages of a failed search."""
    return tuple(p._replace(text=p.text[:PREVIEW_CHARACTERS]) for p in passages[:PREVIEWS])
