"""Warm-ups: systems with teachers, rejection sampling, divergence, and a complete run."""

from __future__ import annotations

import random

import jax
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.corpus.world import generate
from jax_ragrl.errors import UserError
from jax_ragrl.learner.imitation import Example, pack
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.rollout.collect import Environment, collect
from jax_ragrl.rollout.rewards import answer_rewards
from jax_ragrl.run.components import load_policy
from jax_ragrl.systems.baselines.executor import SearchAgent
from jax_ragrl.text.metrics import cover_match
from jax_ragrl.warmstart import warmup
from jax_ragrl.warmstart.teachers.base import TeacherSampler
from jax_ragrl.warmstart.warmup import (
    Warmup,
    action_examples,
    build_world_retriever,
    load_warmup,
    warm_up,
)
from tests.tiny import policy, tokenizer

AUTO_RAG = CONFIGS / "tiny" / "warmup_auto_rag.py"


def test_a_system_without_a_teacher_is_refused():
    values = {"system": "jax_ragrl.systems.baselines.rag_ddr", "recipe": {}}
    with pytest.raises(UserError, match="rag_ddr': it has no teacher, use c3po"):
        load_warmup(values)


def test_auto_rag_learns_only_traces_with_correct_answers():
    config, task = load_warmup(load_config(AUTO_RAG, []))
    assert isinstance(task.system, SearchAgent) and task.system.kind == "auto_rag"
    assert [stage.only_correct for stage in config.stages] == [False, True]
    world = generate(3, 60, hops=(1, 2))
    teacher = TeacherSampler(task.teacher({"p_misread": 0.9}), tokenizer())
    environment = Environment(teacher, build_world_retriever(world), None)  # no language model
    forest = collect(task.system, task.expander, world.questions["train"][:40], environment)
    forest = forest._replace(reward_N=answer_rewards(forest, cover_match))
    ends = {r.question: r.answer for r in forest.records if r.role == "leaf"}
    right = {i for i, answer in ends.items() if answer in forest.questions[i].answers}
    assert 0 < len(right) < 40
    expected = [
        Example(r.action.prompt_ids, r.action.ids, "agent")
        for r in forest.records
        if r.action and r.question in right
    ]
    assert action_examples(forest, random.Random(0), only_correct=True) == expected
    assert len(action_examples(forest, random.Random(0), only_correct=False)) > len(expected)


def test_non_finite_parameters_stop_a_warm_up(tmp_path):
    """The flag of the last step is enough: parameters that are not finite remain so."""
    log = warmup._Log(Warmup((), 1.0), tmp_path / "warmup.jsonl")
    log.check()
    batch, _ = pack([Example((1,), (2,), "agent")], 1, 4)
    for flag in (0.0, 1.0):
        log.step(batch, {"loss": 1.0, "skipped": 0.0, "not_finite": flag})
    for stop in (log.check, lambda: log.write({})):
        with pytest.raises(UserError, match="parameters of the policy are NaN or infinite"):
            stop()
    assert (tmp_path / "warmup.jsonl").read_text() == ""


@pytest.mark.slow
def test_both_stages_of_auto_rag_run_and_save_a_model(tmp_path):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    values = load_config(AUTO_RAG, [])
    short = {"steps": 1, "questions_per_world": 4}
    values |= {
        "policy": str(folder),
        "tokens_per_step": 1024,
        "row_lengths": (1024,),
        "log_every": 2,
    }
    values["stages"] = [stage | short for stage in values["stages"]]
    with jax.numpy_dtype_promotion("standard"):  # optax mixes integers and floats
        last = warm_up(*load_warmup(values), tmp_path / "out")
    assert last["step"] == 2 and last["loss"] > 0
    assert load_policy(str(tmp_path / "out" / "checkpoint"))[1].vocabulary() == (
        tokenizer().vocabulary()
    )
