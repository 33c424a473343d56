"""Every system answers questions with its teacher as the policy; examples for a frozen model."""

import collections
import dataclasses
import functools
import random
from typing import Any

import numpy as np
import pytest

from jax_ragrl.corpus.world import World, generate
from jax_ragrl.credit.advantages import group_centred
from jax_ragrl.llm.reader import UNKNOWN, WorldReader
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.models import policy_folder
from jax_ragrl.systems import coda, opera
from jax_ragrl.systems.baselines import executor
from jax_ragrl.text.prompts import user_turn
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest
from jax_ragrl.warmstart.teacher_examples import (
    RecordingLLM,
    build_world_retriever,
    careful_reader,
    fact_examples,
    reading_examples,
)
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.teachers.coda import Teacher as CodaTeacher
from jax_ragrl.warmstart.teachers.opera import Teacher as OperaTeacher

COUNT = 120


@functools.cache
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer.load(policy_folder("tiny"))


@functools.cache
def world() -> tuple[World, Retriever]:
    synthetic = generate(1, 120)
    return synthetic, build_world_retriever(synthetic)


def environment(teacher: Any) -> Environment:
    synthetic, retriever = world()
    return Environment(TeacherSampler(teacher, tokenizer()), retriever, WorldReader(synthetic))


def roll_out(system: Any, teacher: Any, count: int = COUNT) -> Forest:
    """Rolls out the first questions of the world with a teacher."""
    return collect(
        system, single_chain, world()[0].questions["train"][:count], environment(teacher)
    )


def accuracy(forest: Forest) -> float:
    leaves = [r for r in forest.records if r.role == "leaf"]
    return float(np.mean([r.answer in forest.questions[r.question].answers for r in leaves]))


TINY = {"style": "coda_tiny", "as_chat_turns": True}


def test_the_careful_teacher_of_coda_is_correct_and_valid():
    recipe = coda.recipe(coda.Settings(coda.CoDA(**TINY)))
    forest = roll_out(recipe.system, CodaTeacher())
    assert accuracy(forest) > 0.97
    assert recipe.reward(forest)[forest.leaf_N].mean() > 5.3  # of 5.5
    assert all(r.parsed.valid for r in forest.records if r.parsed)


@pytest.mark.parametrize("kind", ["autorefine", "search_r1", "auto_rag"])
def test_the_careful_teacher_of_single_agents_is_correct(kind):
    recipe = executor.recipe(executor.Settings(executor.SearchAgent(kind, max_turns=7, **TINY)))
    forest = roll_out(recipe.system, CodaTeacher())
    assert accuracy(forest) > 0.97 and recipe.reward(forest)[forest.leaf_N].mean() > 0.97


def test_only_single_agent_contexts_grow_with_hops():
    """Section 3.4 of the paper, in prompt tokens: O(H L_doc) against O(h L_doc)."""

    def peak(forest: Forest, role: str, hops: int) -> float:
        """Returns the median over questions of the longest prompt."""
        peaks: dict[int, int] = {}
        for r in forest.records:
            if r.action and r.role == role and forest.questions[r.question].hops == hops:
                peaks[r.question] = max(peaks.get(r.question, 0), len(r.action.prompt_ids))
        return float(np.median(list(peaks.values())))

    nested = roll_out(coda.recipe(coda.Settings(coda.CoDA(**TINY))).system, CodaTeacher())
    agent = executor.SearchAgent(max_turns=7, **TINY)
    alone = roll_out(agent, CodaTeacher())
    assert peak(alone, "agent", 4) > 2.5 * peak(alone, "agent", 1)
    assert peak(nested, "executor", 4) < 1.2 * peak(nested, "executor", 1)
    assert peak(nested, "planner", 4) < 0.6 * peak(alone, "agent", 4)


# --- OPERA --------------------------------------------------------------------------------------

OPERA = opera.Settings(
    opera.Opera("opera_tiny", top_k=2, shared_policy=True),
    gold="world",
    expert_pool="world",
    min_plan_steps=1,
)


def test_the_careful_teacher_of_opera_is_correct_and_rewarded():
    recipe = opera.recipe(OPERA)
    forest = roll_out(recipe.system, OperaTeacher())
    assert accuracy(forest) > 0.97
    reward_N = recipe.reward(forest)
    for role, least in (("plan", 0.97), ("analysis", 0.99), ("rewrite", 0.9)):
        nodes = [n for n, r in enumerate(forest.records) if r.role == role]
        assert nodes and reward_N[nodes].mean() > least
    assert all(r.parsed.valid for r in forest.records if r.parsed)


CODA = coda.recipe(coda.Settings(coda.CoDA(**TINY))).system


@pytest.mark.parametrize(
    ("system", "teacher"),
    [
        (CODA, CodaTeacher(p_early_stop=0.6)),
        (CODA, CodaTeacher(p_misread=0.6)),
        (opera.recipe(OPERA).system, OperaTeacher(p_single_step=0.7)),
        (opera.recipe(OPERA).system, OperaTeacher(p_accept_first=0.7)),
    ],
)
def test_a_careless_teacher_is_valid_and_often_wrong(system, teacher):
    forest = roll_out(system, teacher)
    assert 0.1 < accuracy(forest) < 0.8
    assert all(r.parsed.valid for r in forest.records if r.parsed)


@pytest.mark.parametrize(
    ("role", "flaw"),
    [("plan", "p_single_step"), ("analysis", "p_accept_first"), ("rewrite", "p_repeat_query")],
)
def test_a_stage_of_opera_trains_one_role_with_an_expert(role, flaw):
    recipe = opera.recipe(
        dataclasses.replace(OPERA, system=dataclasses.replace(OPERA.system, top_k=1))
    )
    questions = world()[0].questions["train"][:20]
    careless = environment(OperaTeacher(**{flaw: 0.5}))
    forest = collect(recipe.system, recipe.expander(frozenset((role,))), questions, careless)
    reward_N = recipe.reward(forest)
    credit_N, weight_N = recipe.compare(forest, reward_N, rule=group_centred)
    assert {r.role for r, w in zip(forest.records, weight_N, strict=True) if w > 0} == {role}
    nodes = np.flatnonzero(weight_N > 0)
    experts = [n for n in nodes if forest.records[n].path[-1] == 0]  # forced actions come first
    assert experts and credit_N[experts].mean() > 0.01
    assert np.sum(credit_N * weight_N) == pytest.approx(0.0, abs=1e-3)


STYLE = "c3po_tiny"


def target(example):
    assert example.target[-1] == tokenizer().stop_ids[0]
    return tokenizer().decode(example.target)


def test_half_of_the_fact_examples_are_famous():
    synthetic = generate(3, 60)
    examples = fact_examples(synthetic, STYLE, tokenizer(), random.Random(0), 40)
    answers = [target(row) for row in examples]
    famous = {synthetic.facts[entity][relation] for entity, relation in synthetic.famous}
    assert answers.count(UNKNOWN) == 20
    assert all(answer in famous for answer in answers if answer != UNKNOWN)


def test_a_reading_example_has_the_careful_readers_reply():
    synthetic = generate(3, 60)
    question = next(q for q in synthetic.questions["train"] if q.hops == 2)
    turn = user_turn(STYLE, "roadmap", question=question.text, documents="")
    llm = RecordingLLM(WorldReader(synthetic, style=STYLE))
    llm.complete([LLMRequest("roadmap", turn, seed=i) for i in range(50)])
    reader = careful_reader(synthetic, STYLE)
    draws = [
        reading_examples(llm.requests, reader, tokenizer(), random.Random(i)) for i in range(40)
    ]
    # Fifty equal requests give one example, in about half of the draws.
    assert set(collections.Counter(map(len, draws))) == {0, 1}
    row = next(examples for examples in draws if examples)[0]
    expected = "\n".join(f"{i}. {step}" for i, step in enumerate(question.steps, 1))
    assert target(row) == expected
