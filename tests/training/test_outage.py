"""Failed questions, evaluations without a score and diverged parameters are never saved."""

import collections
import dataclasses
import functools
import pathlib
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_ragrl.cli.main import CONFIGS, load_config
from jax_ragrl.credit.advantages import group_centred
from jax_ragrl.errors import UserError
from jax_ragrl.learner import optimizer
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.learner.dpo import pairs_of
from jax_ragrl.learner.packing import Turn, turns_of
from jax_ragrl.learner.policies import update_all
from jax_ragrl.rollout.trace import trees
from jax_ragrl.rollout.tree import build_forest
from jax_ragrl.run import inference
from jax_ragrl.run.build import build_components
from jax_ragrl.run.checkpoint_name import RunCheckpoint
from jax_ragrl.run.config import Job
from jax_ragrl.run.evaluate import Result, Trace
from jax_ragrl.run.load import load_job, load_recipe
from jax_ragrl.run.parts import Components
from jax_ragrl.runtime import servers
from jax_ragrl.training import loop
from jax_ragrl.training.log import read_metrics
from jax_ragrl.training.rollout_metrics import describe_rollout, expert_fractions
from tests.rollout.tape import ANN, BOB
from tests.tiny import saved_policy

SYSTEMS = ("c3po", "mmoa_rag", "coda", "mao_arag", "opera", "tree_grpo", "rag_ddr")
SMALL = {
    "data.world.size": 40,
    "index.kind": "exact",
    "run.questions_per_step": 2,
    "run.save_every": 1,
    "run.eval_before_training": False,
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_step_of_failed_questions_trains_nothing(system):
    recipe = load_recipe(load_config(CONFIGS / "tiny" / f"{system}.py", []))
    roles = tuple(recipe.system.roles)
    forest = build_forest([ANN, BOB], [], {0: "away", 1: "away"})
    forest = forest._replace(reward_N=recipe.reward(forest))
    compare = recipe.compare and functools.partial(recipe.compare, rule=group_centred)
    for credit in filter(None, (recipe.credit, compare)):
        credit_N, weight_N = credit(forest, forest.reward_N)
        assert credit_N.shape == weight_N.shape == (0,)
    turns = turns_of(forest, credit_N, weight_N)
    assert not turns and not pairs_of(forest, turns, roles)
    metrics = describe_rollout(forest, credit_N)
    metrics |= expert_fractions(forest, recipe.expander(frozenset(roles)), roles)
    assert metrics["failed"] == 2 and np.isfinite(list(metrics.values())).all()
    assert trees(forest, credit_N, 2) == []


def small_values(folder: pathlib.Path, **changes: object) -> dict[str, Any]:
    """Returns the config of CoDA with a policy in `folder`; `changes` are keys of `run`."""
    values = SMALL | {"policy": folder / "policy"} | {f"run.{k}": v for k, v in changes.items()}
    overrides = [f"--config.{key}={value}" for key, value in values.items()]
    return load_config(CONFIGS / "tiny" / "coda.py", overrides)


def small_run(folder: pathlib.Path, **changes: object) -> tuple[Job, Components]:
    """Returns a job of CoDA in a directory, and its components."""
    saved_policy(folder)
    job = load_job(small_values(folder, **changes))
    return job, build_components(job, folder)


def result(score: float, failures: tuple[str, ...] = ()) -> Result:
    """Returns an evaluation of two questions with the same score, or NaN."""
    scores = {"cover_em": np.full(2, score), "f1": np.full(2, score), "em": np.full(2, score)}
    ended = collections.Counter(failed=len(failures))
    traces = (Trace("answered", None, (), ()),) * 2
    lists = {"failures": failures, "passages": ((), ()), "traces": traces}
    return Result(scores, ended, {}, {}, {}, {}, (None, None), **lists)


ROLL_OUT = "jax_ragrl.training.rollouts.collect_shard"  # for `monkeypatch.setattr`


def roll_out_nothing(method, environment, questions, step):
    return build_forest(questions, [], {})


def fail_at(monkeypatch: pytest.MonkeyPatch, down: set[int]) -> tuple[set[int], list[Any]]:
    """Lets all questions of some steps fail; returns these and a list of all rollouts."""
    requests: list[Any] = []

    def roll_out(method, environment, questions, step):
        requests.append((step, [question.id for question in questions]))
        failed = range(len(questions)) if step in down else ()
        return build_forest(questions, [], dict.fromkeys(failed, "no route to the server"))

    monkeypatch.setattr(ROLL_OUT, roll_out)
    return down, requests


def test_an_outage_is_not_saved_and_its_steps_are_repeated(tmp_path, monkeypatch):
    job, parts = small_run(tmp_path, steps=7, dev_questions=0)
    down, requests = fail_at(monkeypatch, {1, 2, 3, 4, 5})
    monkeypatch.setattr(loop, "dev_metrics", lambda *_: {})
    with pytest.raises(UserError, match=r"5 steps in a row .* no route to the server"):
        loop.train(job, parts, tmp_path)
    assert [step for step, _ in requests] == [0, 1, 2, 3, 4, 5]
    assert Checkpoints(tmp_path).latest() == 1
    before = requests[:]
    with pytest.raises(UserError, match=r"the first step .* no route to the server"):
        loop.train(job, parts, tmp_path)  # the first step of a process does not wait
    assert requests[6:] == [before[1]]
    requests[:] = []
    down -= {1, 4, 5}  # a shorter outage does not stop the run
    loop.train(job, parts, tmp_path)
    assert requests[:5] == before[1:] and requests[-1][0] == 6
    assert [row["failed"] for row in read_metrics(tmp_path)] == [0, 0, 2, 2, 0, 0, 0]


def test_an_outage_at_the_last_step_is_repeated(tmp_path, monkeypatch):
    job, parts = small_run(tmp_path, steps=4, dev_questions=0)
    down, requests = fail_at(monkeypatch, {2, 3})
    with pytest.raises(UserError, match="not saved.*no route to the server.*--workdir=") as error:
        loop.train(job, parts, tmp_path)
    assert str(tmp_path) in str(error.value) and Checkpoints(tmp_path).latest() == 2
    before = requests[:]
    requests.clear()
    down.clear()
    loop.train(job, parts, tmp_path)
    assert requests == before[2:] and Checkpoints(tmp_path).latest() == 4
    rows = read_metrics(tmp_path)
    assert [(row["step"], row["failed"]) for row in rows] == [(i, 0) for i in (1, 2, 3, 4)]


def test_an_evaluation_without_a_score_warns_or_is_repeated(tmp_path, monkeypatch):
    job, parts = small_run(tmp_path, steps=2, dev_questions=2, eval_every=1)
    results = [result(np.nan, ("connection refused",) * 2)] * 2 + [result(0.5)]
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: results.pop(0))
    with (
        pytest.warns(UserWarning, match="no dev question could be scored.*connection refused"),
        pytest.raises(UserError, match="last step is not saved: no dev question.*refused"),
    ):
        loop.train(job, parts, tmp_path)
    assert Checkpoints(tmp_path).latest() == 1
    loop.train(job, parts, tmp_path)
    rows = read_metrics(tmp_path)
    assert [row["eval/accuracy"] for row in rows] == [None, 0.5]
    assert [row.get("eval/failed") for row in rows] == [2, None]
    assert Checkpoints(tmp_path).latest() == 2


@pytest.mark.parametrize(
    ("change", "part"),
    [({"answers": ("another",)}, "train"), ({"gold": ("p9",)}, r"train \(gold\)")],
)
def test_a_resumed_run_refuses_other_questions(tmp_path, monkeypatch, change, part):
    """A file of questions is edited between two calls; the config names the same file."""
    job, parts = small_run(tmp_path, steps=2, dev_questions=0)

    def roll_out(method, environment, questions, step):
        if step == 1 and parts.questions is before:
            raise KeyboardInterrupt
        return build_forest(questions, [], {})

    before = parts.questions
    monkeypatch.setattr(ROLL_OUT, roll_out)
    with pytest.raises(KeyboardInterrupt):
        loop.train(job, parts, tmp_path)
    first, *rest = before["train"]
    edited = (dataclasses.replace(first, **change), *rest)
    parts = parts._replace(questions={**before, "train": edited})
    with pytest.raises(
        UserError, match=rf"begun with other {part} questions .*delete questions\.json"
    ):
        loop.train(job, parts, tmp_path)
    (tmp_path / "questions.json").unlink()  # as in a run of an earlier version
    loop.train(job, parts, tmp_path)
    assert Checkpoints(tmp_path).latest() == 2
    with pytest.raises(UserError, match=f"begun with other {part} questions"):
        loop.train(job, parts._replace(questions=before), tmp_path)


def test_the_first_evaluation_is_step_zero_and_is_never_repeated(tmp_path, monkeypatch):
    """A run that is called again after its last step keeps the rows that it has."""
    job, parts = small_run(
        tmp_path, steps=1, dev_questions=2, eval_every=1, eval_before_training=True
    )
    results = [result(0.25), result(0.5)]
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: results.pop(0))
    servers.COUNTS["server_retries"] += 1  # before the run, of which it is no metric
    for _ in range(2):
        loop.train(job, parts, tmp_path)
        rows = read_metrics(tmp_path)
        assert [(row["step"], row["eval/accuracy"]) for row in rows] == [(0, 0.25), (1, 0.5)]
        assert "server_retries" not in rows[1]
    files = sorted(file.name for file in (tmp_path / "predictions").iterdir())
    assert files == ["dev-0.jsonl", "dev-1.jsonl"]


def test_diverged_parameters_stop_the_run_and_checkpoints_remain(tmp_path, monkeypatch):
    """The learning rate becomes infinite after three updates."""
    job, parts = small_run(tmp_path, steps=6, dev_questions=0)
    rate = lambda count: jnp.where(count < 3, 1e-4, jnp.inf)  # noqa: E731
    turns = [Turn(i, "actor", (5, 6, 7), (8, 9 + i), credit=1.0 - 2 * i) for i in range(2)]
    monkeypatch.setattr(optimizer, "_transform", functools.cache(lambda *_: optax.adamw(rate)))
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr("jax_ragrl.training.step.turns_of", lambda *_, **__: [])

    def learn(method, policies, forest, _, step):
        (name,), role = policies, next(iter(method.policy_of))
        own = [turn._replace(role=role) for turn in turns]
        return update_all(policies, {role: name}, [role], own, random.Random(step))

    monkeypatch.setattr(loop, "learn", learn)
    with pytest.raises(UserError, match="parameters of the policy are NaN or infinite"):
        loop.train(job, parts, tmp_path)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 3
    state = inference.trained_policies(job, parts.policies, RunCheckpoint(tmp_path))
    weights = jax.device_get(jax.tree.leaves(nnx.state(state[next(iter(state))], nnx.Param)))
    assert all(np.isfinite(x).all() for x in weights)
