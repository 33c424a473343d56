"""A step in which every question failed learns nothing; several in a row stop the run."""

from __future__ import annotations

import collections
import functools
import json
import pathlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.errors import UserError
from jax_ragrl.learner import optimizer
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.learner.dpo import pairs_of
from jax_ragrl.learner.packing import Turn, turns_of
from jax_ragrl.learner.policies import update_all
from jax_ragrl.models.hf import save_decoder
from jax_ragrl.rollout.trace import trees
from jax_ragrl.rollout.tree import plant
from jax_ragrl.run import inference
from jax_ragrl.run.components import Parts, assemble
from jax_ragrl.run.config import Job, load_job, load_recipe
from jax_ragrl.run.evaluate import Result
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


def small_run(folder: pathlib.Path, **changes: object) -> tuple[Job, Parts]:
    """A run of CoDA in a folder, and its parts."""
    tokenizer().save(folder / "tokenizer")
    base = save_decoder(nnx.merge(*policy()), folder / "policy", folder / "tokenizer")
    values = SMALL | {"policy": base} | {f"run.{key}": value for key, value in changes.items()}
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    job = load_job(load_config(CONFIGS / "tiny" / "coda.py", overrides))
    return job, assemble(job, folder)


def result(score: float, failures: tuple[str, ...] = ()) -> Result:
    """An evaluation of two questions, both with a score or none."""
    scores = {"cover_em": np.full(2, score), "f1": np.full(2, score), "em": np.full(2, score)}
    ended = collections.Counter(failed=len(failures))
    return Result(scores, ended, {}, {}, {}, {}, (None, None), failures)


def test_an_outage_stops_the_run_before_it_is_saved_and_the_run_goes_on_after_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    job, parts = small_run(tmp_path, steps=7, dev_questions=0)
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


def test_a_last_step_without_answers_is_not_saved_and_is_repeated(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    job, parts = small_run(tmp_path, steps=4, dev_questions=0)
    down, requests = {2, 3}, []

    def roll_out(job, environment, questions, roles, step):
        requests.append((step, [question.id for question in questions]))
        failed = range(len(questions)) if step in down else ()
        return plant(questions, [], dict.fromkeys(failed, "no route to the server"))

    monkeypatch.setattr(loop, "roll_out", roll_out)
    with pytest.raises(UserError, match="not saved.*no route to the server.*--workdir=") as error:
        loop.train(job, parts, tmp_path)
    assert str(tmp_path) in str(error.value) and Checkpoints(tmp_path).latest() == 2
    before, requests[:], down = requests[:], [], set()
    loop.train(job, parts, tmp_path)
    assert requests == before[2:] and Checkpoints(tmp_path).latest() == 4
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["failed"]) for row in rows] == [(i, 0) for i in (1, 2, 3, 4)]


def test_an_evaluation_without_a_score_is_warned_of_and_the_last_one_is_repeated(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    job, parts = small_run(tmp_path, steps=2, dev_questions=2, eval_every=1)
    results = [result(np.nan, ("connection refused",) * 2)] * 2 + [result(0.5)]
    monkeypatch.setattr(loop, "roll_out", lambda job, env, questions, *_: plant(questions, [], {}))
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: results.pop(0))
    with (
        pytest.warns(UserWarning, match="no dev question could be scored.*connection refused"),
        pytest.raises(UserError, match="last step is not saved: no dev question.*refused"),
    ):
        loop.train(job, parts, tmp_path)
    assert Checkpoints(tmp_path).latest() == 1
    loop.train(job, parts, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval/accuracy"] for row in rows] == [None, 0.5]
    assert [row.get("eval/failed") for row in rows] == [2, None]
    assert Checkpoints(tmp_path).latest() == 2


def test_parameters_that_are_not_finite_stop_the_run_and_the_checkpoints_before_remain(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Adam at a rate that becomes infinite after three updates."""
    job, parts = small_run(tmp_path, steps=6, dev_questions=0)
    rate = lambda count: jnp.where(count < 3, 1e-4, jnp.inf)  # noqa: E731
    turns = [Turn(i, "actor", (5, 6, 7), (8, 9 + i)) for i in range(2)]
    monkeypatch.setattr(optimizer, "_transform", functools.cache(lambda *_: optax.adamw(rate)))
    monkeypatch.setattr(loop, "roll_out", lambda job, env, questions, *_: plant(questions, [], {}))
    monkeypatch.setattr(loop, "turns_of", lambda *_, **__: [])

    def learn(job, policies, forest, credit_N, _, roles, step):
        (name,), role = policies, next(iter(job.policy_of))
        own = [turn._replace(role=role) for turn in turns]
        numbers = np.array([1.0, -1.0], np.float32)
        rng = random.Random(step)
        return update_all(policies, {role: name}, [role], own, numbers, {}, rng)

    monkeypatch.setattr(loop, "learn", learn)
    with pytest.raises(UserError, match="parameters of the policy are NaN or infinite"):
        loop.train(job, parts, tmp_path)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 3
    state = inference.trained_policies(job, parts.policies, tmp_path)
    weights = jax.device_get(jax.tree.leaves(nnx.state(state[next(iter(state))], nnx.Param)))
    assert all(np.isfinite(x).all() for x in weights)
