"""Warm-ups: which systems have a teacher, what is kept of it, and that one runs."""

from __future__ import annotations

import random

import jax
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.corpus.world import generate
from jax_ragrl.errors import UserError
from jax_ragrl.learner.imitation import Example
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.run.components import load_policy
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.text.metrics import cover_match
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.warmup import load_warmup, rows, search_world, warm_up
from tests.tiny import policy, tokenizer

AUTO_RAG = CONFIGS / "tiny" / "warmup_auto_rag.py"


def test_a_system_without_a_teacher_is_refused():
    values = {"system": "jax_ragrl.systems.baselines.rag_ddr", "recipe": {}}
    with pytest.raises(UserError, match="rag_ddr': it has no teacher, use c3po"):
        load_warmup(values)


def test_auto_rag_learns_the_traces_that_end_right_and_no_others():
    config, lesson = load_warmup(load_config(AUTO_RAG, []))
    assert isinstance(lesson.system, SearchAgent) and lesson.system.prompt == "executor"
    assert [stage.only_correct for stage in config.stages] == [False, True]
    world = generate(3, 60, hops=(1, 2))
    teacher = TeacherSampler(lesson.teacher({"misread": 0.9}), tokenizer())
    environment = Environment(teacher, search_world(world), None)  # it asks no language model
    forest = collect(lesson.system, lesson.expander, world.questions["train"][:40], environment)
    forest = forest._replace(reward_N=answer_rewards(forest, cover_match))
    ends = {r.question: r.answer for r in forest.records if r.role == "leaf"}
    right = {i for i, answer in ends.items() if answer in forest.questions[i].answers}
    assert 0 < len(right) < 40
    expected = [
        Example(r.action.prompt_ids, r.action.ids, "agent")
        for r in forest.records
        if r.action and r.question in right
    ]
    assert rows(forest, random.Random(0), only_correct=True) == expected
    assert len(rows(forest, random.Random(0), only_correct=False)) > len(expected)


@pytest.mark.slow
def test_both_stages_of_auto_rag_run_and_leave_a_model(tmp_path):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    values = load_config(AUTO_RAG, [])
    short = {"steps": 1, "questions": 4}
    values |= {"start": str(folder), "tokens": 1024, "buckets": (1024,), "log_every": 2}
    values["stages"] = [stage | short for stage in values["stages"]]
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
        last = warm_up(*load_warmup(values), tmp_path / "out")
    assert last["step"] == 2 and last["loss"] > 0
    assert load_policy(str(tmp_path / "out" / "checkpoint"))[1].vocabulary() == (
        tokenizer().vocabulary()
    )
