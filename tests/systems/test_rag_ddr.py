"""RAG-DDR: sampled outputs, preference pairs, and a run that learns from them."""

import json

import numpy as np
import pytest

from jax_ragrl.cli.main import CONFIGS, main
from jax_ragrl.learner.dpo import pairs_of
from jax_ragrl.learner.packing import turns_of
from jax_ragrl.rollout.collect import collect
from jax_ragrl.systems.baselines import rag_ddr
from jax_ragrl.systems.baselines.rag_ddr import Settings
from jax_ragrl.systems.mmoa_rag import GENERATOR, MMOARAG, SELECTOR
from jax_ragrl.training import step
from jax_ragrl.training.setup import method_of
from tests.jobs import config_job
from tests.rollout.tape import ANN, Tape

SYSTEM = MMOARAG("mmoa_rag_tiny", "S+G", 2, "D")
CONFIG = CONFIGS / "tiny" / "rag_ddr.py"


def forest_of(role: str, texts: dict[str, list[str]]):
    recipe = rag_ddr.recipe(Settings(SYSTEM, group_size=3))
    tape = Tape(texts)
    forest = collect(recipe.system, recipe.expander(frozenset((role,))), [ANN], tape.environment())
    credit_N, weight_N = recipe.credit(forest, recipe.reward(forest))
    return forest, turns_of(forest, credit_N, weight_N), tape


def texts_of(forest, pairs):
    by_ids = {r.action.ids: r.action.text for r in forest.records if r.action}
    return [(by_ids[p.chosen], by_ids[p.rejected], p.role) for p in pairs]


def test_best_and_worst_answers_form_a_pair_and_equal_ones_none():
    answers = ["**in Ulm**", "**Ulm**", "**Rom**"]
    forest, turns, tape = forest_of(GENERATOR, {SELECTOR: ["D0"], GENERATOR: answers})
    assert tape.log == [("search", ANN.text, 2), (SELECTOR,), (GENERATOR,)]
    pairs = pairs_of(forest, turns, (GENERATOR,))
    assert texts_of(forest, pairs) == [("**Ulm**", "**Rom**", GENERATOR)]
    assert pairs_of(forest, turns, (SELECTOR,)) == []
    assert pairs_of(forest, turns, (GENERATOR,), margin=1.0) == []
    same = {SELECTOR: ["D0"], GENERATOR: ["**Rom**", "**Bonn**", "**Rom**"]}
    forest, turns, _ = forest_of(GENERATOR, same)
    assert pairs_of(forest, turns, (GENERATOR,)) == []
    one = {SELECTOR: ["D0"], GENERATOR: ["**Ulm**"] * 3}
    forest, turns, _ = forest_of(GENERATOR, one)
    assert pairs_of(forest, turns, (GENERATOR,)) == []


def test_a_selection_is_judged_by_its_answer():
    texts = {SELECTOR: ["D0", "D1", "D0,D1"], GENERATOR: ["**Rom**", "**Ulm**", "**at Ulm**"]}
    forest, turns, tape = forest_of(SELECTOR, texts)
    assert tape.log == [("search", ANN.text, 2), (SELECTOR,)] + [(GENERATOR,)] * 3
    pairs = pairs_of(forest, turns, (SELECTOR,))
    assert texts_of(forest, pairs) == [("D1", "D0", SELECTOR)]


def test_only_trained_actions_are_in_a_pair(monkeypatch):
    """Actions without a counted leaf (their credit has no meaning) are left out, and forced actions
    if these are not trained."""
    answers = ["**in Ulm**", "**Ulm**", "**Rom**"]
    forest, turns, _ = forest_of(GENERATOR, {SELECTOR: ["D0"], GENERATOR: answers})
    job = config_job("tiny/rag_ddr")
    turns = [t for t in turns if forest.records[t.node].action.text != "**Rom**"]
    monkeypatch.setattr(
        step, "prefer_all", lambda policies, policy_of, pairs, *_, **__: (pairs, {})
    )
    pairs, _ = step.learn(method_of(job), {}, forest, turns, 0)
    assert texts_of(forest, pairs) == [("**Ulm**", "**in Ulm**", GENERATOR)]


def test_the_generator_learns_first():
    job = config_job("tiny/rag_ddr")
    roles = tuple(job.policy_of)
    assert job.schedule.roles(0, roles) == (GENERATOR,)
    assert job.schedule.roles(job.run.steps - 1, roles) == (SELECTOR,)


@pytest.mark.slow
def test_it_trains_from_the_command_line(tmp_path):
    small = ("run.steps=1", "run.questions_per_step=8", "run.dev_questions=4", "data.world.size=60")
    overrides = [f"--config.{change}" for change in small]
    assert main(["train", f"--config={CONFIG}", f"--workdir={tmp_path}", *overrides]) == 0
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["pairs"] > 0 and row["dropped_too_long"] == 0 and np.isfinite(row["loss/dpo"])
    assert row["loss/dpo"] == pytest.approx(np.log(2), rel=0.05) and row["grad_norm"] > 0
