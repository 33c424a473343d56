"""RAG-DDR: what is perturbed, what is preferred, and a run that learns from it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jax_ragrl.cli.main import CONFIGS, load_config, main
from jax_ragrl.errors import UserError
from jax_ragrl.learner.dpo import pairs_of
from jax_ragrl.learner.packing import turns_of
from jax_ragrl.rollout.collect import collect
from jax_ragrl.run.config import load_job
from jax_ragrl.systems.baselines import rag_ddr
from jax_ragrl.systems.baselines.rag_ddr import Settings
from jax_ragrl.systems.mmoa_rag import GENERATOR, MMOARAG, SELECTOR
from jax_ragrl.train import loop
from tests.rollout.tape import ANN, Tape

SYSTEM = MMOARAG("mmoa_rag_tiny", "S+G", 2, "D")
CONFIG = CONFIGS / "tiny" / "rag_ddr.py"


def forest_of(role: str, texts: dict[str, list[str]]):
    recipe = rag_ddr.recipe(Settings(SYSTEM, samples=3))
    tape = Tape(texts)
    forest = collect(recipe.system, recipe.expander(frozenset((role,))), [ANN], tape.environment())
    return forest, recipe.credit(forest, recipe.reward(forest))[0], tape


def texts_of(forest, pairs):
    by_ids = {r.action.ids: r.action.text for r in forest.records if r.action}
    return [(by_ids[p.chosen], by_ids[p.rejected], p.role) for p in pairs]


def test_the_generators_best_and_worst_answer_are_a_pair():
    answers = ["**in Ulm**", "**Ulm**", "**Rom**"]
    forest, credit_N, tape = forest_of(GENERATOR, {SELECTOR: ["D0"], GENERATOR: answers})
    assert tape.log == [("search", ANN.text, 2), (SELECTOR,), (GENERATOR,)]
    pairs = pairs_of(forest, credit_N, (GENERATOR,))
    assert texts_of(forest, pairs) == [("**Ulm**", "**Rom**", GENERATOR)]
    assert pairs_of(forest, credit_N, (SELECTOR,)) == []
    assert pairs_of(forest, credit_N, (GENERATOR,), margin=1.0) == []


def test_a_selection_is_judged_by_the_answer_it_leads_to():
    texts = {SELECTOR: ["D0", "D1", "D0,D1"], GENERATOR: ["**Rom**", "**Ulm**", "**at Ulm**"]}
    forest, credit_N, tape = forest_of(SELECTOR, texts)
    assert tape.log == [("search", ANN.text, 2), (SELECTOR,)] + [(GENERATOR,)] * 3
    pairs = pairs_of(forest, credit_N, (SELECTOR,))
    assert texts_of(forest, pairs) == [("D1", "D0", SELECTOR)]


def test_equal_outcomes_and_equal_outputs_make_no_pair():
    same = {SELECTOR: ["D0"], GENERATOR: ["**Rom**", "**Bonn**", "**Rom**"]}
    forest, credit_N, _ = forest_of(GENERATOR, same)
    assert pairs_of(forest, credit_N, (GENERATOR,)) == []
    one = {SELECTOR: ["D0"], GENERATOR: ["**Ulm**"] * 3}
    forest, credit_N, _ = forest_of(GENERATOR, one)
    assert pairs_of(forest, credit_N, (GENERATOR,)) == []


def test_only_what_would_be_trained_is_in_a_pair(monkeypatch):
    """Not what leads to no leaf that counts (its credit says nothing), nor what was forced where
    that is not to be trained."""
    answers = ["**in Ulm**", "**Ulm**", "**Rom**"]
    forest, credit_N, _ = forest_of(GENERATOR, {SELECTOR: ["D0"], GENERATOR: answers})
    job = load_job(load_config(CONFIG, []))
    known_N = np.array([r.action is None or r.action.text != "**Rom**" for r in forest.records])
    turns = turns_of(forest, known_N.astype(np.float32))
    monkeypatch.setattr(loop, "prefer_all", lambda policies, policy_of, pairs, *_: (pairs, {}))
    pairs, _ = loop.learn(job, {}, forest, credit_N, turns, (GENERATOR,), 0)
    assert texts_of(forest, pairs) == [("**Ulm**", "**in Ulm**", GENERATOR)]


def test_a_single_sample_is_refused():
    with pytest.raises(UserError, match="samples is 1.*pair"):
        Settings(SYSTEM, samples=1)


def test_the_generator_learns_first():
    job = load_job(load_config(CONFIG, []))
    roles = tuple(job.policy_of)
    assert job.schedule.roles(0, roles) == (GENERATOR,)
    assert job.schedule.roles(job.run.steps - 1, roles) == (SELECTOR,)


@pytest.mark.slow
def test_it_trains_from_the_command_line(tmp_path):
    small = ("run.steps=1", "run.questions=8", "run.dev_questions=4", "data.world.size=60")
    given = [f"--config.{change}" for change in small]
    assert main(["train", f"--config={CONFIG}", f"--workdir={tmp_path}", *given]) == 0
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["pairs"] > 0 and row["left_out"] == 0 and np.isfinite(row["loss/dpo"])
    assert row["loss/dpo"] == pytest.approx(np.log(2), rel=0.05) and row["grad_norm"] > 0
