"""Audits credit rules of a frozen policy against executed replay.

    question -> one rollout -> a decision of it -> two different actions that the policy samples
                                 |                      |
                  replay: chains that continue after    rules: the rollouts that each would train
                  the action, with equal keys for all   on, through this state and this action,
                  actions, until the error is small     repeated with other keys
                                 |                      |
                         Q(s, a) - V(s)    compared    credit of the action      (bench.fidelity)

A state is the question and the replies so far, so that rollouts continue anywhere. Two shapes of
rollouts are audited: groups of chains, of which one goes through the state while the others start
at the question, and trees, which branch from the state on. States in which all samples are equal
have no choice to credit and are left out, as are those of concurrent actions.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import inspect
import pathlib
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup

from jax_ragrl.bench.fidelity import Replay, moments_of, replay_of, with_intervals
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.credit.advantages import group_centred, group_normalised, leave_one_out
from jax_ragrl.credit.assign import GROUP_CREDITS, RETURN_CREDITS, reachable_leaves
from jax_ragrl.errors import UserError
from jax_ragrl.report.charts import FULL
from jax_ragrl.report.svg import Frame, element, join, svg, text, ticks
from jax_ragrl.rollout.branches import Branch, Nodes
from jax_ragrl.rollout.collect import ActionRequest, ActionSampler, Environment, collect, finish
from jax_ragrl.rollout.effects import Generate
from jax_ragrl.rollout.expand import Branching, Expander, Tree, single_chain
from jax_ragrl.rollout.policy import PolicySampler
from jax_ragrl.rollout.rewards import rewards_of
from jax_ragrl.rollout.system import Execution, before_last_reply
from jax_ragrl.rollout.tree import NO_PARENT, Action, Call, Forest, Record
from jax_ragrl.run.build import build_components
from jax_ragrl.run.claims import DECISIONS, claim_data, claim_models, has_results
from jax_ragrl.run.workdir import claim_workdir
from jax_ragrl.runtime.caches import write_text
from jax_ragrl.runtime.jsonl import append_row, filter_rows, read_rows, write_json
from jax_ragrl.runtime.progress import progress
from jax_ragrl.runtime.revision import device_name, revision
from jax_ragrl.systems.ablation import own_credit
from jax_ragrl.systems.base import Credit, Recipe, checked_credit, path_from_root
from jax_ragrl.training.setup import method_of, prepare_policies
from jax_ragrl.training.step import with_scorer
from jax_ragrl.types import Question

BLOCK = 4  # questions whose rollouts share batches
DRAWS = 8  # samples among which the two audited actions are the first two different ones
ALTERNATIVES = 4  # further samples, of which V(s) is the mean
PILOT, MOST = 16, 1024  # continuations after an action
LUCK = 0x9E3779B9  # changes the seeds of the other roles
BRANCHING_DEPTH = 4  # the last depth at which trees branch, as in C-3PO
TREES = ("reachable_leaves", "child_mean", "siblings")
COMMAND = "ragrl bench credit"
COLUMNS = {
    "agreement": "Agreement",
    "scale": "Scale",
    "bias": "Bias",
    "correlation": "Correlation",
    "sign": "Sign",
    "noise": "Noise",
    "luck": "Others' luck",
    "trained": "Trained",
    "offset": "Offset",
    "tokens": "Tokens per action",
    "worth": "Worth per 1,000 tokens",
}
WITH_INTERVAL = ("agreement", "scale", "bias", "correlation", "worth")
GROUP_RULES = (group_centred, group_normalised, leave_one_out)


@dataclasses.dataclass(frozen=True)
class Audit:
    """What is audited.

    Fields:
      rules: names of credits (`credit.assign`) or `module:function`; empty: all of the package.
      questions: training questions; each has one decision.
      error: the largest standard error of the replayed difference between two actions.
      repeats: repetitions of a rule's rollouts after each action; each has two draws.
      group: rollouts per question in a group of chains.
      widths: actions per decision of the trees.
    """

    rules: tuple[str, ...] = ()
    questions: int = 48
    error: float = 0.05
    repeats: int = 4
    group: int = 4
    widths: tuple[int, ...] = (2, 4)

    def __post_init__(self) -> None:
        if self.repeats < 2 or self.group < 2 or min(self.widths) < 2 or not self.error > 0:
            raise UserError(
                f"repeats {self.repeats}, group {self.group}, widths {self.widths} and error "
                f"{self.error}: a variance needs two or more of each, and an error is above 0"
            )


class Shape(NamedTuple):
    """How rollouts branch."""

    name: str
    expander: Expander
    rollouts: int = 1


CHAIN = Shape("replay", single_chain)


class AuditedRule(NamedTuple):
    """A credit rule on rollouts of one shape; a group credit with one group rule."""

    name: str
    shape: Shape
    credit: Credit
    is_return: bool


class Decision(NamedTuple):
    """A state that waits for one action of a role, with the path to it.

    Fields:
      path, round: of the actions that are tried in the state, see `Record`.
      records, calls: the actions on the way, and the calls to the environment.
    """

    execution: Execution
    path: tuple[int, ...]
    round: int
    records: tuple[Record, ...]
    calls: tuple[Call, ...]

    @property
    def effect(self) -> Generate:
        (effect,) = self.execution.effects
        assert isinstance(effect, Generate)
        return effect


class Trial(NamedTuple):
    """Rollouts through a decision in which `action` is sampled.

    Equal keys draw equal numbers, also for different actions; with `has_other_luck` the draws of
    the other roles are others.
    """

    decision: Decision
    action: Action
    key: str
    has_other_luck: bool = False


@dataclasses.dataclass(frozen=True)
class SamplerWithLuck:
    """Samples actions; by the identity of a question, of which role the seeds are kept."""

    sampler: ActionSampler
    kept_role: Mapping[int, str]

    def sample(self, requests: Sequence[ActionRequest]) -> list[list[Action]]:
        """Returns the actions of each request."""
        kept = [self.kept_role.get(id(r.question), r.role.name) for r in requests]
        changed = [r._replace(seed=r.seed ^ LUCK) for r in requests]
        rows = zip(requests, changed, kept, strict=True)
        return self.sampler.sample([r if r.role.name == role else c for r, c, role in rows])


def replay(
    recipe: Recipe, shape: Shape, trials: Sequence[Trial], environment: Environment, seed: int
) -> tuple[Forest, np.ndarray, list[int | None]]:
    """Rolls out trials; returns the forest, one question per trial, its rewards and actions.

    The last has the node of each trial's action; None if the environment failed.
    """
    questions, kept_role = [], {}
    for trial in trials:
        question = trial.decision.execution.state.question
        questions.append(dataclasses.replace(question, id=f"{question.id} {trial.key}"))
        if trial.has_other_luck:
            kept_role[id(questions[-1])] = trial.decision.effect.role
    environment = environment._replace(sampler=SamplerWithLuck(environment.sampler, kept_role))
    nodes = Nodes(
        recipe.system, shape.expander, tuple(questions), functools.cache(environment.count)
    )
    # 1. The path to each decision, as it was; the other rollouts of a group begin at the question.
    starts, live = [], []
    for i, (trial, question) in enumerate(zip(trials, questions, strict=True)):
        decision, first = trial.decision, len(nodes.records)
        for n, record in enumerate(decision.records):
            parent = first + n - 1 if n else NO_PARENT
            copied = (0,) * (shape.rollouts > 1) + record.path
            copy = dataclasses.replace(record, parent=parent, question=i, path=copied)
            nodes.records.append(copy)
            nodes.places.append((i, 0, *[0] * record.round))
        numbers = tuple(range(first, len(nodes.records)))
        path = (0,) * (shape.rollouts > 1) + decision.path
        start = Branch(decision.execution, i, numbers[-1] if numbers else NO_PARENT, path, numbers)
        starts.append(start._replace(calls=decision.calls, place=(i, 0, *[0] * decision.round)))
        root = Execution(recipe.system, question) if shape.rollouts > 1 else decision.execution
        live += [Branch(root, i, path=(n,), place=(i, n)) for n in range(1, shape.rollouts)]
    # 2. In the decision the action of the trial takes the place of the first sample.
    requests = []
    for start, trial, question in zip(starts, trials, questions, strict=True):
        branching = shape.expander(trial.decision.effect, question.text)
        # As many samples as otherwise, of which the first is dropped: the others stay the same.
        rest = branching if branching.samples > 1 else branching._replace(samples=0)
        requests.append(request_of(recipe, trial.decision, rest, start.seed(seed, question)))
    replies = environment.sampler.sample(requests)
    for start, trial, request, actions in zip(starts, trials, requests, replies, strict=True):
        first = len(request.branching.forced_actions)
        tried = [*actions[:first], trial.action, *actions[first + 1 :]]
        live += nodes.advance(start, [tried])
    # 3. The rest.
    forest = finish(nodes, live, environment, seed, lockstep=True)
    found: list[int | None] = [None] * len(trials)
    for n, record in reversed([*enumerate(forest.records)]):
        start, action = starts[record.question], trials[record.question].action
        # It may be one node with a forced action, which comes before it.
        is_tried = record.path[:-1] == start.path
        if is_tried and record.action and record.action.ids == action.ids:
            found[record.question] = n
    return forest, rewards_of(recipe.reward, forest), found


def request_of(
    recipe: Recipe, decision: Decision, branching: Branching, seed: int
) -> ActionRequest:
    """Returns the request for actions in the state of a decision."""
    effect, state = decision.effect, decision.execution.state
    role = recipe.system.roles[effect.role]
    history = effect.history
    return ActionRequest(role, effect.messages, branching, seed, history, state.question, state)


def decision_of(recipe: Recipe, forest: Forest, question: int, seed: int) -> Decision | None:
    """Draws one decision of an unbranched rollout: a role, then one of its decisions.

    None if there is none, for example because the environment failed.
    """
    found: dict[str, list[Decision]] = {}
    nodes = [int(n) for n in forest.nodes_of(question)]
    for node in nodes:
        record = forest.records[node]
        if record.action is None:
            continue
        execution = before_last_reply(recipe.system, record.state)
        if len(execution.effects) > 1:
            continue
        before = path_from_root(forest, node)[:-1]
        calls = forest.records[nodes[-1]].calls  # the leaf's
        decision = Decision(
            execution,
            record.path[:-1],
            record.round,
            tuple(forest.records[n] for n in before),
            tuple(call for call in calls if call.round < record.round),
        )
        found.setdefault(record.role, []).append(decision)
    rng = random.Random(f"{seed} {forest.questions[question].id}")
    return rng.choice(found[rng.choice(sorted(found))]) if found else None


def note_failures(forest: Forest, rows: Sequence[dict[str, Any]]) -> None:
    """Adds to the record of each question whose environment failed why it is left out."""
    for i, message in zip(forest.failed_questions, forest.failures, strict=True):
        rows[i].setdefault("error", message)
        rows[i]["skipped"] = "failed"


def rules_of(audit: Audit, recipe: Recipe) -> list[AuditedRule]:
    """Returns the audited rules, each on the shapes that it is made for; others on all shapes."""
    chains = Shape(f"{audit.group} chains", single_chain, audit.group)
    trees = [Shape(f"tree of {w}", Tree(w, BRANCHING_DEPTH)) for w in dict.fromkeys(audit.widths)]
    expander = recipe.expander(frozenset(recipe.system.roles))
    # The rollouts of the recipe may hold forced actions.
    recipes = [] if expander is single_chain else [Shape("the recipe", expander, recipe.rollouts)]
    credits: dict[str, Any] = {**RETURN_CREDITS, **GROUP_CREDITS}
    rules = []
    for name in dict.fromkeys(audit.rules or credits):
        if name not in credits and ":" not in name:
            raise UserError(
                f"--rules has {name!r}: use {', '.join(credits)}, or module:function of your own"
            )
        credit = credits.get(name) or own_credit("--rules", name)
        every = [chains, *trees, *recipes]
        shapes = trees if name in TREES else [chains] if name in credits else every
        compares = "rule" in inspect.signature(credit).parameters
        for shape in shapes:
            for rule in GROUP_RULES if compares else (None,):
                own = functools.partial(credit, rule=rule) if rule else credit
                words = [shape.name, name, *([rule.__name__] if rule else [])]
                rules.append(AuditedRule(", ".join(words), shape, own, not compares))
    return rules


class Auditor(NamedTuple):
    """The frozen policy in its environment, and what is audited."""

    recipe: Recipe
    environment: Environment
    audit: Audit
    rules: Sequence[AuditedRule]
    seed: int
    scored: Callable[[Forest], Forest] = lambda forest: forest

    def check_own_rules(self, question: Question) -> None:
        """Raises `UserError` for one's own rule that returns no credits for a whole rollout."""
        own = [rule for rule in self.rules if ":" in rule.name]
        for shape in {rule.shape.name: rule.shape for rule in own}.values():
            whole, reward_N = self._roll_out(shape, [question])
            for rule in own:
                if rule.shape == shape and whole.records:
                    self._assign(rule, whole, reward_N)

    def rows(self, questions: Sequence[Question]) -> list[dict[str, Any]]:
        """Audits one decision per question; returns a record for `table` of each.

        Where the environment failed in any of its rollouts, it holds the first `error` alone.
        """
        own = [dataclasses.replace(q, id=f"{q.id} first") for q in questions]
        forest = collect(self.recipe.system, single_chain, own, self.environment, seed=self.seed)
        decisions = [decision_of(self.recipe, forest, i, self.seed) for i in range(len(own))]
        rows: list[dict[str, Any]] = [{"question": q.id} for q in questions]
        note_failures(forest, rows)
        chosen = iter(self._actions([d for d in decisions if d is not None]))
        live = []
        for row, decision in zip(rows, decisions, strict=True):
            if decision is None:
                row.setdefault("skipped", "no decision")
                continue
            effect, actions = decision.effect, next(chosen)
            row |= {"role": effect.role, "depth": effect.depth}
            if len({action.ids for action in actions[:DRAWS]}) < 2:
                row["skipped"] = "one action"
                continue
            pair = [*{action.ids: action for action in actions[:DRAWS][::-1]}.values()][::-1]
            live.append((row, decision, pair[:2], actions[DRAWS:]))
        if live:
            self._replay(live)
            self._credit(live, {q.id: q for q in questions})
        kept = ("question", "skipped", "error")
        return [{k: row[k] for k in kept} if "error" in row else row for row in rows]

    def _actions(self, decisions: Sequence[Decision]) -> list[list[Action]]:
        """Samples actions in each state."""
        starts = [(d, Branch(d.execution, 0, path=d.path)) for d in decisions]
        # Requests for one action each, as in chains: another number would be another program.
        requests = [
            request_of(
                self.recipe,
                decision,
                Branching(1),
                start.seed(self.seed, decision.execution.state.question, n + 1),
            )
            for decision, start in starts
            for n in range(DRAWS + ALTERNATIVES)
        ]
        sampled = iter(self.environment.sampler.sample(requests))
        return [[next(sampled)[0] for _ in range(DRAWS + ALTERNATIVES)] for _ in decisions]

    def _replay(self, live: Sequence[Any]) -> None:
        """Adds the replayed values to each record."""
        # 1. A pilot tells how many continuations the error needs, and is not used further: counts
        # that depend on their own rewards would bias them.
        tables, weights = [], []
        for _, _, pair, others in live:
            actions = {action.ids: action for action in (*pair, *others)}
            share = [sum(o.ids == ids for o in others) / ALTERNATIVES for ids in actions]
            tables.append([*actions.values()])
            weights.append(np.array(share))
        pilots = self._continue(live, tables, "pilot", [PILOT] * len(live))
        if all("skipped" in row for row, *_ in live):
            return
        counts = []
        for (row, *_), pilot, share_U in zip(live, pilots, weights, strict=True):
            if "skipped" in row:
                counts.append(0)
                continue
            found = replay_of(pilot, share_U, ALTERNATIVES)
            error = found.gap_error * np.sqrt(PILOT) / self.audit.error
            counts.append(int(np.clip(np.ceil(error**2), PILOT, MOST)))
        # 2. The values.
        returns = self._continue(live, tables, "replay", counts)
        for (row, _, pair, _), return_UM, share_U, count in zip(
            live, returns, weights, counts, strict=True
        ):
            if "skipped" in row:
                continue
            values = replay_of(return_UM, share_U, ALTERNATIVES)
            row["actions"] = [action.text for action in pair]
            row["continuations"] = count
            row["rules"] = {}
            row["replay"] = {k: np.asarray(v).tolist() for k, v in values._asdict().items()}

    def _continue(
        self,
        live: Sequence[Any],
        tables: Sequence[Sequence[Action]],
        key: str,
        counts: Sequence[int],
    ) -> list[np.ndarray]:
        """Returns the returns of continuations, `[U, M]` for each decision; nan if one failed."""
        named = [
            (row, Trial(decision, action, f"{key} {n}"))
            for (row, decision, _, _), actions, count in zip(live, tables, counts, strict=True)
            for action in actions
            for n in range(count)
        ]
        trials = [trial for _, trial in named]
        forest, reward_N, nodes = replay(self.recipe, CHAIN, trials, self.environment, self.seed)
        note_failures(forest, [row for row, _ in named])
        value_N, _ = reachable_leaves(forest, reward_N)
        values = iter([np.nan if n is None else float(value_N[n]) for n in nodes])
        return [
            np.array([[next(values) for _ in range(count)] for _ in actions])
            for actions, count in zip(tables, counts, strict=True)
        ]

    def _credit(self, live: Sequence[Any], questions: Mapping[str, Question]) -> None:
        """Adds the draws of each rule to each record, and the costs of its rollouts."""
        repeats = self.audit.repeats
        for shape in {rule.shape.name: rule.shape for rule in self.rules}.values():
            live = [item for item in live if "skipped" not in item[0]]
            if not live:
                return
            trials = [
                Trial(decision, action, f"draw {r}", has_other_luck)
                for _, decision, pair, _ in live
                for action in pair
                for r in range(repeats)
                for has_other_luck in (False, True)
            ]
            forest, reward_N, nodes = replay(
                self.recipe, shape, trials, self.environment, self.seed
            )
            asked = [questions[row["question"]] for row, *_ in live]
            whole, whole_reward_N = self._roll_out(shape, asked)
            # A draw that failed is not one that was not trained: its decision is left out.
            note_failures(forest, [row for row, *_ in live for _ in range(4 * repeats)])
            note_failures(whole, [row for row, *_ in live])
            if all("skipped" in row for row, *_ in live):
                continue
            tokens = [0] * len(live)
            for record in whole.records:
                tokens[record.question] += len(record.action.ids) if record.action else 0
            for rule in (rule for rule in self.rules if rule.shape == shape):
                found = self._assign(rule, forest, reward_N)
                found_whole = self._assign(rule, whole, whole_reward_N)
                if found is None or found_whole is None:
                    continue
                (credit_N, weight_N), (_, whole_weight_N) = found, found_whole
                if not rule.is_return:  # a node has the credit of all of its samples
                    credit_N = credit_N / np.maximum(forest.multiplicity_N - forest.forced_N, 1)
                draws = [
                    None if n is None or not weight_N[n] > 0 else float(credit_N[n]) for n in nodes
                ]
                table = np.array(draws, np.float64).reshape(len(live), 2, repeats, 2)
                for i, (row, *_) in enumerate(live):
                    is_trained = (whole.question_N == i) & ~whole.leaf_N & (whole_weight_N > 0)
                    row["rules"][rule.name] = {
                        "credit": table[i].tolist(),
                        "tokens": tokens[i],
                        "actions": int(is_trained.sum()),
                    }

    def _roll_out(self, shape: Shape, questions: Sequence[Question]) -> tuple[Forest, np.ndarray]:
        """Returns whole rollouts of a shape, of which a rule has the costs, and their rewards."""
        forest = collect(
            self.recipe.system,
            shape.expander,
            [dataclasses.replace(q, id=f"{q.id} cost") for q in questions],
            self.environment,
            seed=self.seed,
            rollouts=shape.rollouts,
        )
        return forest, rewards_of(self.recipe.reward, forest)

    def _assign(
        self, rule: AuditedRule, forest: Forest, reward_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the credit and the weight of each node; None if not made for such rollouts."""
        try:
            found = rule.credit(self.scored(forest), reward_N)
        except UserError:
            return None
        credit_N, weight_N = checked_credit(f"--rules: {rule.name}", found, len(forest.records))
        if self.recipe.trainable is not None:
            weight_N = np.where(self.recipe.trainable(forest), weight_N, np.float32(0))
        return credit_N, weight_N


def bench_credit(values: Mapping[str, Any], audit: Audit, folder: pathlib.Path) -> dict[str, Any]:
    """Audits rules on the policy of a config; returns the table, as the files in `docs/data`.

    `folder` holds finished decisions, one per line of `decisions.jsonl` (resumable), the table and
    `page.html`. `UserError` if it holds decisions of another audit, or the environment failed for
    all that could be audited.
    """
    job = claim_workdir(values, folder, "--folder")
    rules = rules_of(audit, job.recipe)
    save_config(
        folder / "audit.json",
        {"audit": dataclasses.asdict(audit)},
        # Their number may grow: each is audited by itself, except for rounding errors.
        free=("config.audit.questions",),
        renew=not has_results(folder),
        place="--folder",
    )
    parts = build_components(job, folder)
    claim_data(parts.retriever, parts.questions, folder)
    claim_models(job, folder, is_trained=False)
    sampler = PolicySampler(parts.models(), parts.tokenizer, job.shapes)
    policies = prepare_policies(job, parts.policies, parts.tokenizer)
    scored = functools.partial(
        with_scorer, method=method_of(job), policies=policies, tokenizer=parts.tokenizer
    )
    auditor = Auditor(job.recipe, parts.environment(sampler), audit, rules, job.seed, scored)
    shuffled = [*parts.questions["train"]]
    random.Random(job.seed).shuffle(shuffled)
    chosen = shuffled[: audit.questions]
    file = folder / DECISIONS
    # Removes a line that a killed audit left incomplete: a new row would be appended to it.
    filter_rows(file, lambda row: True)
    done = {row["question"] for row in read_rows(file)}
    rest = [question for question in chosen if question.id not in done]
    failed = []
    if rest:  # before the replay, which takes long
        auditor.check_own_rules(rest[0])
    with progress("audit", "decision", len(chosen), initial=len(chosen) - len(rest)) as bar:
        for i in range(0, len(rest), BLOCK):
            for row in auditor.rows(rest[i : i + BLOCK]):
                if "error" in row:  # asked again by the next call
                    failed.append(row)
                else:
                    append_row(file, row)
            bar.update(len(rest[i : i + BLOCK]))
    ids = {question.id for question in chosen}
    rows = [row for row in read_rows(file) if row["question"] in ids] + failed
    if failed:
        first = (
            f"{len(failed)} of {len(rows)} questions failed, the first with: {failed[0]['error']}"
        )
        remedy = "run the same command again, which asks them again"
        if all("skipped" in row for row in rows):
            raise UserError(f"no decision was audited: {first}. Fix the cause and {remedy}")
        print(f"ragrl: {first}; {remedy}", file=sys.stderr)
    result = table(rows, rules, audit)
    write_json(folder / "table.json", result)
    write_text(folder / "page.html", page(result, rows, rules))
    return result


def table(
    rows: Sequence[Mapping[str, Any]], rules: Sequence[AuditedRule], audit: Audit
) -> dict[str, Any]:
    """Returns the measures of each rule over all decisions, by role, and by depth."""
    audited = [row for row in rows if "skipped" not in row]
    groups = {"all": audited}
    for key in ("role", "depth"):
        for value in sorted({row[key] for row in audited}):
            groups[f"{key} {value}"] = [row for row in audited if row[key] == value]
    cells = [
        {"group": group, "cells": {"Rule": rule.name, "Decisions": len(own)} | found}
        for group, members in groups.items()
        for rule in rules
        if (own := [row for row in members if rule.name in row["rules"]])
        if (found := _cells(own, rule))
    ]
    commit, skipped = revision(), [row["skipped"] for row in rows if "skipped" in row]
    return {
        "title": f"Credit against executed replay, {len(audited)} decisions "
        f"({len(skipped)} left out: {', '.join(sorted(set(skipped))) or 'none'})",
        "device": device_name(),
        "columns": ["Rule", "Decisions", *COLUMNS.values()],
        "rows": [{**row, "command": COMMAND, "commit": commit} for row in cells],
        "errors": [row for row in rows if "error" in row],
        "audit": dataclasses.asdict(audit),
    }


def moments_in(row: Mapping[str, Any], name: str, *, is_return: bool) -> np.ndarray:
    """Returns the moments of a rule in a line of `decisions.jsonl`, see `moments_of`."""
    draws = row["rules"][name]
    replayed: dict[str, Any] = {k: np.array(v, np.float64) for k, v in row["replay"].items()}
    credit = np.array(draws["credit"], np.float64)
    size = {"tokens": draws["tokens"], "actions": draws["actions"]}
    return moments_of(credit, Replay(**replayed), is_return=is_return, **size)


def _cells(rows: Sequence[Mapping[str, Any]], rule: AuditedRule) -> dict[str, str]:
    moments = [moments_in(row, rule.name, is_return=rule.is_return) for row in rows]
    found = with_intervals(moments)
    return {
        title: f"{found[name][0]:.2f} [{found[name][1]:.2f}, {found[name][2]:.2f}]"
        if name in WITH_INTERVAL
        else f"{found[name][0]:.2f}"
        for name, title in COLUMNS.items()
    }


def page(
    result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], rules: Sequence[AuditedRule]
) -> str:
    """Returns one HTML page without scripts: intervals by rule, gaps against gaps, the table."""
    source = importlib.resources.files("jax_ragrl.report") / "template.html"
    style = source.read_text(encoding="utf-8").partition("<style>")[2].partition("</style>")[0]
    tables = [row["cells"] for row in result["rows"] if row["group"] == "all"]
    charts = [
        element("h2", title) + element("div", _intervals(tables, title), class_="card")
        for title in (COLUMNS["agreement"], COLUMNS["correlation"], COLUMNS["worth"])
    ]
    gaps = join([_gaps(rows, rule) for rule in rules])
    lines = [join(element("th", name) for name in result["columns"])]
    lines += [join(element("td", str(cell)) for cell in cells.values()) for cells in tables]
    body = join(
        [
            element("h1", result["title"]),
            *charts,
            element("h2", "Mean credit of one action minus that of another, over the replayed gap"),
            element("div", gaps, class_="grid small"),
            element("h2", "All measures"),
            element("div", element("table", join(element("tr", x) for x in lines)), class_="card"),
        ]
    )
    head = f'<!doctype html><meta charset="utf-8"><title>Credit audit</title><style>{style}</style>'
    return f"{head}<main>{body}</main>\n"


def _intervals(tables: Sequence[Mapping[str, str]], title: str) -> Markup:
    """One measure of all rules with its interval."""
    ends = [[float(x) for x in re.findall(r"-?[0-9.]+|nan", row[title])] for row in tables]
    finite = [x for row in ends for x in row if np.isfinite(x)]
    # An interval of few decisions may be wide without end, and is cut.
    top = max([1.0, *(abs(mean) for mean, *_ in ends if np.isfinite(mean))])
    low, high = max(min([0.0, *finite]), -2 * top), min(max([1.0, *finite]), 3 * top)
    frame = Frame(FULL, 34 + 24 * len(ends), low, high, 0, 1, margin_left=310)
    parts = [
        element("line", x1=frame.x(v), x2=frame.x(v), y1=4, y2=frame.height - 24, class_="rule")
        + text(frame.x(v), frame.height - 6, f"{v:g}", "middle")
        for v in ticks(low, high, 8)
    ]
    for i, (row, (mean, *around)) in enumerate(zip(tables, ends, strict=True)):
        y = 16 + 24 * i
        parts.append(text(296, y + 4, row["Rule"], "end", "label"))
        if np.isfinite([mean, *around]).all():
            x0, x1, x = (frame.x(min(max(v, low), high)) for v in (*around, mean))
            parts.append(element("line", x1=x0, x2=x1, y1=y, y2=y, class_="whisker"))
            parts.append(element("circle", cx=x, cy=y, r=4, class_="mean"))
    return svg(frame.width, frame.height, title, *parts)


def _gaps(rows: Sequence[Mapping[str, Any]], rule: AuditedRule) -> Markup:
    """The expected credit's gap over the replayed gap, a dot per decision."""
    dots = []
    for row in rows:
        if rule.name in row.get("rules", {}):
            credit = np.array(row["rules"][rule.name]["credit"], np.float64)
            first, second = np.where(np.isfinite(credit), credit, 0.0).mean((1, 2))
            advantages = row["replay"]["advantage_A"]
            dots.append((advantages[0] - advantages[1], first - second))
    if not dots:
        return Markup("")
    size = max(1.0, *(abs(x) for dot in dots for x in dot))
    frame = Frame(260, 200, -size, size, -size, size, 34, 6, 8, 20)
    parts = [
        element("line", x1=frame.x(-size), x2=frame.x(size), y1=frame.y(0), y2=frame.y(0),
                class_="rule"),
        element("line", x1=frame.x(0), x2=frame.x(0), y1=frame.y(-size), y2=frame.y(size),
                class_="rule"),
        element("line", x1=frame.x(-size), x2=frame.x(size), y1=frame.y(-size), y2=frame.y(size),
                class_="zero"),
        text(28, frame.y(size) + 8, f"{size:.2g}", "end"),
        text(28, frame.y(-size), f"{-size:.2g}", "end"),
    ]  # fmt: skip
    parts += [
        element("circle", cx=frame.x(x), cy=frame.y(y), r=3, class_="dot c0") for x, y in dots
    ]
    return element(
        "div", element("h3", rule.name) + svg(260, 200, rule.name, *parts), class_="card"
    )
