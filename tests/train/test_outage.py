"""A step in which every question failed learns nothing; several in a row stop the run."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.learner.dpo import pairs_of
from jax_ragrl.learner.packing import turns_of
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.rollout.trace import trees
from jax_ragrl.rollout.tree import plant
from jax_ragrl.run.components import assemble
from jax_ragrl.run.config import load_job, load_recipe
from jax_ragrl.train import loop
from jax_ragrl.train.rollout_metrics import describe, expert_shares
from tests.rollout.tape import ANN, BOB
from tests.tiny import policy, tokenizer

SYSTEMS = ("c3po", "mmoa_rag", "coda", "mao_arag", "opera", "tree_grpo", "rag_ddr")
SMALL = {"data.world.size": 40, "index.kind": "exact", "run.questions": 2, "run.save_every": 1}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_whose_questions_all_failed_has_numbers_and_nothing_to_train(system: str):
    recipe = load_recipe(load_config(CONFIGS / "tiny" / f"{system}.py", []))
    roles = tuple(recipe.system.roles)
    forest = plant([ANN, BOB], [], {0: "away", 1: "away"})
    forest = forest._replace(reward_N=recipe.reward(forest))
    credit_N, weight_N = recipe.credit(forest, forest.reward_N)
    for rule in (recipe.credit, *recipe.advantages.values()):
        assert [x_N.shape for x_N in rule(forest, forest.reward_N)] == [(0,), (0,)]
    assert not turns_of(forest, weight_N) and not pairs_of(forest, credit_N, roles)
    metrics = describe(forest, credit_N)
    metrics |= expert_shares(forest, recipe.expander(frozenset(roles)), roles)
    assert metrics["failed"] == 2 and np.isfinite(list(metrics.values())).all()
    assert trees(forest, credit_N, 2) == []


def test_an_outage_stops_the_run_before_it_is_saved_and_the_run_goes_on_after_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    given = SMALL | {"policy": folder, "run.steps": 7, "run.dev_questions": 0}
    overrides = [f"--config.{key}={value}" for key, value in given.items()]
    job = load_job(load_config(CONFIGS / "tiny" / "coda.py", overrides))
    parts = assemble(job, tmp_path)
    down, asked = {1, 2, 3, 4, 5}, []

    def roll_out(job, environment, questions, roles, step):
        asked.append((step, [question.id for question in questions]))
        failed = range(len(questions)) if step in down else ()
        return plant(questions, [], dict.fromkeys(failed, "no route to the server"))

    monkeypatch.setattr(loop, "roll_out", roll_out)
    monkeypatch.setattr(loop, "dev_metrics", lambda *_: {})
    with pytest.raises(UserError, match=r"5 steps in a row .* no route to the server"):
        loop.train(job, parts, tmp_path)
    assert [step for step, _ in asked] == [0, 1, 2, 3, 4, 5]
    assert Checkpoints(tmp_path).latest() == 1
    before = asked[:]
    with pytest.raises(UserError, match=r"the first step .* no route to the server"):
        loop.train(job, parts, tmp_path)  # whoever starts and hears nothing does not wait
    assert asked[6:] == [before[1]]
    asked[:], down = [], {2, 3}  # what is not answered for long enough is passed over
    loop.train(job, parts, tmp_path)
    assert asked[:5] == before[1:] and asked[-1][0] == 6
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["failed"] for line in lines] == [0, 0, 2, 2, 0, 0, 0]
