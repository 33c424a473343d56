"""The worked example of CONTRIBUTING.md: a system is one recipe file and one config."""

import json
import pathlib

import numpy as np
import pytest

from jax_ragrl.cli.main import load_config, main
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.tree import LEAF
from jax_ragrl.run.load import load_job
from tests.rollout.tape import ANN, Tape

CONFIG = pathlib.Path(__file__).with_name("config.py")
LOOK = "<think>a</think><search>Ann</search>"


def final(answer: str) -> str:
    return f"<refine>Ann was born in {answer}</refine><answer>{answer}</answer>"


def test_a_turn_has_the_mean_reward_of_its_leaves():
    job = load_job(load_config(CONFIG, []))
    recipe = job.recipe
    assert job.temperature == 1.0 and recipe.system.roles["agent"].sampling.max_tokens == 24
    tape = Tape(
        {"agent": [LOOK, LOOK + " ", final("Ulm"), final("Rom"), final("Ulm"), final("Bonn")]}
    )
    expander = recipe.expander(frozenset(recipe.system.roles))
    forest = collect(recipe.system, expander, [ANN], tape.environment())
    credit_N, weight_N = recipe.credit(forest, recipe.reward(forest))
    first = [i for i, r in enumerate(forest.records) if r.depth == 1 and r.role != LEAF]
    np.testing.assert_allclose(credit_N[first], [0.5, 0.5])
    assert (weight_N > 0).all() and forest.leaf_N.sum() == 4


@pytest.mark.slow
def test_it_trains_from_the_command_line(tmp_path):
    assert main(["train", f"--config={CONFIG}", f"--workdir={tmp_path}"]) == 0
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["step"] == 1 and row["nodes"] > 0 and np.isfinite(row["loss/policy"])
