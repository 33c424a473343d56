"""Every system answers the questions of a small world end to end, with a teacher for a model."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.llm.reader import WorldReader
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import once
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.components import policy_folder
from jax_ragrl.systems import coda
from jax_ragrl.systems.baselines import executor
from jax_ragrl.systems.opera import system as opera
from jax_ragrl.systems.opera.grammar import PLAN
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.warmstart.expert_pool import Try, pool_of, scored
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.teachers.coda import Teacher as CodaTeacher
from jax_ragrl.warmstart.teachers.opera import Teacher as OperaTeacher
from jax_ragrl.warmstart.warmup import search_world

ASKED = 120


@functools.cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(policy_folder("tiny"))


@functools.cache
def world() -> tuple[World, Retriever]:
    made = generate(1, 120)
    return made, search_world(made)


def environment(teacher: Any) -> Environment:
    made, retriever = world()
    return Environment(TeacherSampler(teacher, tokenizer()), retriever, WorldReader(made))


def taught(system: Any, teacher: Any, count: int = ASKED) -> Forest:
    """What a teacher writes for the first questions of the world."""
    return collect(system, once, world()[0].questions["train"][:count], environment(teacher))


def accuracy(forest: Forest) -> float:
    leaves = [r for r in forest.records if r.role == "leaf"]
    return float(np.mean([r.answer in forest.questions[r.question].answers for r in leaves]))


TINY = {"style": "coda_tiny", "chat": True}


def test_the_careful_teacher_answers_through_coda_and_never_breaks_its_form():
    recipe = coda.recipe(coda.Settings(**TINY))
    forest = taught(recipe.system, CodaTeacher())
    assert accuracy(forest) > 0.97
    assert recipe.reward(forest)[forest.leaf_N].mean() > 5.3  # of 5.5
    assert all(r.parsed.valid for r in forest.records if r.parsed)


@pytest.mark.parametrize("flaw", ["early_stop", "misread"])
def test_a_careless_teacher_of_coda_is_legal_and_often_wrong(flaw):
    recipe = coda.recipe(coda.Settings(**TINY))
    forest = taught(recipe.system, CodaTeacher(**{flaw: 0.6}))
    assert 0.2 < accuracy(forest) < 0.8
    assert all(r.parsed.valid for r in forest.records if r.parsed)


@pytest.mark.parametrize("kind", ["autorefine", "search_r1", "auto_rag"])
def test_the_careful_teacher_answers_alone(kind):
    recipe = executor.recipe(executor.Settings(kind, max_turns=7, **TINY))
    forest = taught(recipe.system, CodaTeacher())
    assert accuracy(forest) > 0.97 and recipe.reward(forest)[forest.leaf_N].mean() > 0.97


def test_a_single_context_grows_with_every_hop_and_an_executors_does_not():
    """The paper's section 3.4, counted in prompt tokens: O(H L_doc) against O(h L_doc)."""

    def peak(forest: Forest, role: str, hops: int) -> float:
        """The median over questions of the longest prompt (some executors search twice)."""
        peaks: dict[int, int] = {}
        for r in forest.records:
            if r.action and r.role == role and forest.questions[r.question].hops == hops:
                peaks[r.question] = max(peaks.get(r.question, 0), len(r.action.prompt_ids))
        return float(np.median(list(peaks.values())))

    nested = taught(coda.recipe(coda.Settings(**TINY)).system, CodaTeacher())
    alone = taught(executor.recipe(executor.Settings(max_turns=7, **TINY)).system, CodaTeacher())
    assert peak(alone, "agent", 4) > 2.5 * peak(alone, "agent", 1)
    assert peak(nested, "executor", 4) < 1.2 * peak(nested, "executor", 1)
    assert peak(nested, "planner", 4) < 0.6 * peak(alone, "agent", 4)


# --- OPERA --------------------------------------------------------------------------------------

OPERA = opera.Settings(
    style="opera_tiny", top_k=2, shared=True, gold="world", pool="world", least_steps=1
)


def test_the_careful_teacher_answers_through_opera_and_earns_nearly_everything():
    recipe = opera.recipe(OPERA)
    forest = taught(recipe.system, OperaTeacher())
    assert accuracy(forest) > 0.97
    reward_N = recipe.reward(forest)
    for role, least in (("plan", 0.97), ("analysis", 0.99), ("rewrite", 0.9)):
        nodes = [n for n, r in enumerate(forest.records) if r.role == role]
        assert nodes and reward_N[nodes].mean() > least
    assert all(r.parsed.valid for r in forest.records if r.parsed)


@pytest.mark.parametrize("flaw", ["single_step", "credulous"])
def test_a_careless_teacher_of_opera_is_legal_and_often_wrong(flaw):
    recipe = opera.recipe(OPERA)
    forest = taught(recipe.system, OperaTeacher(**{flaw: 0.7}))
    assert 0.1 < accuracy(forest) < 0.8
    assert all(r.parsed.valid for r in forest.records if r.parsed)


def test_rewriting_finds_what_the_first_query_does_not():
    made = generate(2, 240)
    settings = environment(OperaTeacher())._replace(retriever=search_world(made))
    questions, answered = made.questions["train"][:ASKED], {}
    for rewrites in (0, 2):
        system = opera.Opera("opera_tiny", top_k=2, max_rewrites=rewrites)
        answered[rewrites] = accuracy(collect(system, once, questions, settings))
    assert answered[2] > 0.97 and answered[0] < 0.9


@pytest.mark.parametrize(
    ("role", "flaw"), [("plan", "single_step"), ("analysis", "credulous"), ("rewrite", "stubborn")]
)
def test_a_stage_of_opera_trains_one_role_and_its_expert_is_above_the_careless(role, flaw):
    recipe = opera.recipe(dataclasses.replace(OPERA, top_k=1))
    questions = world()[0].questions["train"][:20]
    careless = environment(OperaTeacher(**{flaw: 0.5}))
    forest = collect(recipe.system, recipe.expander(frozenset((role,))), questions, careless)
    reward_N = recipe.reward(forest)
    credit_N, weight_N = recipe.credit(forest, reward_N)
    assert {r.role for r, w in zip(forest.records, weight_N, strict=True) if w > 0} == {role}
    trained = np.flatnonzero(weight_N > 0)
    experts = [n for n in trained if forest.records[n].path[-1] == 0]  # forced ones come first
    assert experts and credit_N[experts].mean() > 0.01
    assert np.sum(credit_N * weight_N) == pytest.approx(0.0, abs=1e-3)


def test_a_pool_of_scored_actions_has_a_right_plan_for_nearly_every_question():
    made, retriever = world()
    teachers = [OperaTeacher(), OperaTeacher(single_step=0.5, credulous=0.5, stubborn=0.5)]
    questions = made.questions["train"][:40]
    settings = environment(None)
    writers = [TeacherSampler(teacher, tokenizer()) for teacher in teachers]
    rows = []
    for i, writer in enumerate(writers):
        tries = [Try(question, i, 1.0) for question in questions]
        rows += scored(OPERA, writer, retriever, settings.llm, tries).rows
    pool = pool_of(rows)
    best = {c[0].prompt: c[0] for (r, _), c in pool.candidates.items() if r == PLAN}
    assert len(best) == len(questions)
    assert np.mean([candidate.score for candidate in best.values()]) > 0.97
    assert 0.2 < pool.summary()["low"] < 0.6 and pool.summary()["high"] > 0.3
