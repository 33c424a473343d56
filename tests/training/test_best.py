"""The best policies of a run on dev questions, runs that start from them or end early."""

import contextlib
import dataclasses
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from jax_ragrl.cli import train as train_command
from jax_ragrl.config.snapshot import save_config
from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import BEST, Checkpoints
from jax_ragrl.report.build import results as dev_scores
from jax_ragrl.report.load import RunData
from jax_ragrl.run.build import build_components
from jax_ragrl.run.checkpoint_name import RunCheckpoint, has_checkpoints, parse_run
from jax_ragrl.run.config import Run
from jax_ragrl.run.inference import trained_policies
from jax_ragrl.run.load import load_job
from jax_ragrl.text.metrics import METRICS
from jax_ragrl.training import loop
from jax_ragrl.training.best import keep_best
from jax_ragrl.training.early_stop import SCORE, STANDARD_ERROR, Scores
from jax_ragrl.training.log import read_metrics
from tests.training.test_outage import ROLL_OUT, result, roll_out_nothing, small_run, small_values


def moved(policies, step: int):
    """Returns policies whose parameters all equal `step + 1`."""
    full = lambda x: jax.device_put(np.full(x.shape, step + 1, x.dtype), x.sharding)  # noqa: E731
    return {
        name: policy.with_state(
            policy=policy.state.policy._replace(
                params=jax.tree.map(full, policy.state.policy.params)
            )
        )
        for name, policy in policies.items()
    }


def best_of(folder: pathlib.Path) -> dict[int, float]:
    with contextlib.closing(Checkpoints(folder, BEST)) as checkpoints:
        return {step: checkpoints.meta(step)["score"] for step in checkpoints.steps()}


def learn_moved(method, policies, forest, turns, step):
    return moved(policies, step), {}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    """A run of five steps whose second and third steps have the best score; each step is saved."""
    folder, scores = tmp_path_factory.mktemp("trained"), [0.25, 0.75, 0.75, np.nan, 0.5]
    job, parts = small_run(folder, steps=5, dev_questions=2, eval_every=1)
    save_config(folder / "config.json", small_values(folder, steps=5))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ROLL_OUT, roll_out_nothing)
        patch.setattr(loop, "evaluate_models", lambda *_: result(scores.pop(0)))
        patch.setattr(loop, "learn", learn_moved)
        loop.train(job, parts, folder)
    return job, parts, folder


def weights(run: RunCheckpoint, job, parts) -> set[float]:
    (decoder,) = trained_policies(job, parts.policies, run).values()
    leaves = jax.device_get(jax.tree.leaves(nnx.state(decoder, nnx.Param)))
    return {float(x) for leaf in leaves for x in np.unique(leaf)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [("", 5), ("@newest", 5), ("@4", 4), ("@best", 2)])
def test_a_checkpoint_has_a_name(trained, name, step):
    job, parts, folder = trained
    assert weights(parse_run(f"{folder}{name}"), job, parts) == {step}


def test_a_resumed_run_keeps_the_best_policies_unless_a_score_is_higher(
    trained, tmp_path, monkeypatch
):
    parts, folder = trained[1], shutil.copytree(trained[2], tmp_path / "copy")
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr(loop, "learn", learn_moved)
    longer = load_job(small_values(folder, steps=7, dev_questions=2, eval_every=1))
    scores = [0.75, 0.9]
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: result(scores.pop(0)))
    loop.train(longer, parts, folder)
    assert weights(parse_run(f"{folder}@best"), longer, parts) == {7}
    assert [step for step in (5, 6, 7) if (folder / "best" / str(step)).exists()] == [7]


def test_a_better_score_replaces_the_best_policies_of_lost_updates(tmp_path):
    """A run that has resumed before step 7 evaluates it after the step 10 of its lost updates."""
    job, parts = small_run(tmp_path, steps=10)
    policies = loop.prepare_policies(job, parts.policies, parts.tokenizer)
    for step, score in ((10, 0.3), (7, 0.6), (8, 0.5), (7, 0.6)):
        keep_best(tmp_path, step, score, moved(policies, step - 1))
    assert best_of(tmp_path) == {7: 0.6}
    assert weights(parse_run(f"{tmp_path}@best"), job, parts) == {7}


def test_a_run_without_a_checkpoint_forgets_the_best_of_an_earlier_config(tmp_path, monkeypatch):
    """Until the first checkpoint the config of a folder may change."""
    changes = {"dev_questions": 2, "eval_every": 1, "save_every": 20}
    job, parts = small_run(tmp_path, steps=9, **changes)
    scores = [0.9, 0.1, 0.2]

    def learn(method, policies, forest, turns, step):
        if step == 1 and len(scores) == 2:  # the second run has used another score by then
            raise KeyboardInterrupt
        return policies, {}

    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr(loop, "learn", learn)
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: result(scores.pop(0)))
    with pytest.raises(KeyboardInterrupt):
        loop.train(job, parts, tmp_path)
    assert best_of(tmp_path) == {1: 0.9}
    loop.train(load_job(small_values(tmp_path, steps=2, **changes)), parts, tmp_path)
    assert best_of(tmp_path) == {2: 0.2}


def test_an_evaluation_of_few_questions_decides_nothing(tmp_path, monkeypatch):
    """During an outage one of two questions is answered, and right."""
    job, parts = small_run(tmp_path, steps=3, dev_questions=2, eval_every=1, patience=1)
    scores = [np.array([1.0, np.nan]), np.full(2, 0.5), np.full(2, 0.4)]
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)

    def evaluate(*_):
        outage = result(0.0, ("no route to the server",))
        outage = dataclasses.replace(outage, strategies={"Planning": 1})
        return dataclasses.replace(outage, scores=dict.fromkeys(METRICS, scores.pop(0)))

    monkeypatch.setattr(loop, "evaluate_models", evaluate)
    with pytest.warns(UserWarning, match="only 1 of 2 dev questions .* no route to the server"):
        loop.train(job, parts, tmp_path)
    rows = read_metrics(tmp_path)
    assert [row.get("eval/accuracy") for row in rows] == [None, 0.5, 0.4]
    assert "eval/standard_error" not in rows[0] and rows[0]["eval/failed"] == 1
    assert rows[0]["strategy_frac/Planning"] == 1  # of those that were answered
    assert best_of(tmp_path) == {2: 0.5}


def test_a_run_starts_from_the_best_policies_of_another(trained, tmp_path_factory):
    _, parts, folder = trained
    other = tmp_path_factory.mktemp("branch")
    job = load_job(small_values(folder, steps=5) | {"start_from": f"{folder}@best"})
    surroundings = {"questions": parts.questions, "retriever": parts.retriever, "llm": parts.llm}
    # A run that has begun continues from its own checkpoint, so that it needs no other run.
    for workdir, has_begun in ((other, False), (folder, True)):
        (decoder,) = build_components(job, workdir, **surroundings).policies.values()
        leaves = jax.device_get(jax.tree.leaves(decoder.params()))
        values = {float(x) for leaf in leaves for x in np.unique(leaf)}
        assert (values == {2}) != has_begun


def test_a_branch_takes_the_config_of_its_run_and_overrides(trained):
    folder = trained[2]
    values = train_command._train_values(f"{folder}@best", ["--config.optimizer.policy_lr=0.5"])
    assert values["start_from"] == f"{folder}@best"
    assert values["optimizer"]["policy_lr"] == 0.5
    assert values["run"]["steps"] == 5


def test_missing_checkpoints_are_named_and_a_folder_may_have_an_at_sign(trained, tmp_path):
    """Training creates their folder before its first step."""
    other = tmp_path / "other"
    assert has_checkpoints(trained[2]) and not has_checkpoints(other)
    (other / "checkpoints").mkdir(parents=True)
    assert not has_checkpoints(other)
    folder = trained[2]
    with pytest.raises(UserError, match="has no checkpoint 1, only checkpoints of steps 4, 5"):
        parse_run(f"{folder}@1").open()
    with pytest.raises(UserError, match="best holds no checkpoint"):
        parse_run(f"{tmp_path / 'other'}@best").open()
    with pytest.raises(UserError, match="after the @ give newest, best or"):
        parse_run(f"{folder}@last")
    (tmp_path / "run@best").mkdir()
    assert parse_run(tmp_path / "run@best") == RunCheckpoint(tmp_path / "run@best")


def test_the_best_are_those_before_training_if_no_later_score_is_higher(tmp_path, monkeypatch):
    """Training ruins the policies from the first update on."""
    job, parts = small_run(tmp_path, steps=3, dev_questions=2, eval_every=1)
    job = dataclasses.replace(job, run=dataclasses.replace(job.run, eval_before_training=True))
    results = iter([result(0.5), result(0.5), result(0.0), result(0.0)])
    monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: next(results))
    monkeypatch.setattr(loop, "learn", lambda method, policies, *_: (moved(policies, 7), {}))
    loop.train(job, parts, tmp_path)
    (initial,) = parts.policies.values()
    best = trained_policies(job, parts.policies, parse_run(f"{tmp_path}@best"))["policy"]
    equal = jax.tree.map(np.array_equal, *(nnx.state(x, nnx.Param) for x in (initial, best)))
    assert Checkpoints(tmp_path, BEST).latest() == 0 and all(jax.tree.leaves(equal))
    assert Run(steps=1).eval_before_training


def test_the_last_score_and_the_best_one_are_told_apart():
    rows = [{"step": step, "eval/accuracy": x} for step, x in ((0, 0.5), (2, 0.0))]
    text = dev_scores(RunData(rows, (), {}))["Dev score"]
    assert text.endswith("RUN@best has: training did not improve the score")


def scored(score: float | None, error: float | None = None) -> dict[str, float | None]:
    return {SCORE: score, STANDARD_ERROR: error}


@pytest.mark.parametrize(
    ("scores", "count"),
    [
        ((), 0),
        ((0.5,), 0),
        ((0.5, 0.4), 1),
        ((0.5, 0.5), 1),
        ((0.5, 0.4, 0.6), 0),
        ((0.5, 0.4, 0.6, 0.1, 0.2), 2),
        ((None, 0.5, None, 0.4), 1),
        ((0.5, math.nan), 0),
    ],
)
def test_only_a_better_score_is_a_gain(scores, count):
    """Steps without an evaluation do not count."""
    rows = [row for score in scores for row in (scored(score), {"reward/mean": 0.0})]
    assert Scores(rows).without_gain == count


def test_a_drop_is_counted_in_standard_errors_from_the_best_score():
    before = [scored(0.4, 0.04), {"reward/mean": 0.9}, scored(0.5, 0.03), scored(0.45, 0.04)]
    assert Scores(before).drop(scored(0.3, 0.04))["eval/drop"] == pytest.approx(0.2 / 0.05)
    assert Scores(before).drop(scored(0.6, 0.04))["eval/drop"] == pytest.approx(-0.1 / 0.05)
    # Without two standard errors, or noise to compare with, there is none.
    for few in ([], [scored(0.5)], [scored(0.5, math.nan), scored(None)], [scored(1.0, 0.0)]):
        assert Scores(few).drop(scored(0.0, 0.0)) == {}


def test_a_run_ends_by_its_patience_or_its_budget_only():
    scores = Scores([scored(x) | {"policy_tokens": 5} for x in (0.9, 0.5, 0.4, 0.3)])
    assert scores.reason_to_end(0) == scores.reason_to_end(4, 21) == ""
    assert "early stop" in scores.reason_to_end(3)
    assert "has spent its 20 tokens" in scores.reason_to_end(0, 20)
    assert scores.is_spent(21, {"policy_tokens": 1.0}) and not scores.is_spent(21, {})


@pytest.mark.slow
@pytest.mark.parametrize("interrupted_at", [None, 2])
@pytest.mark.parametrize(
    ("settings", "last", "evaluated"),
    [
        ({"patience": 2, "eval_every": 1}, 6, [1, 2, 3, 4, 5, 6]),
        ({"token_budget": 25, "eval_every": 9}, 3, [3]),  # 20 tokens are below the budget
    ],
)
def test_a_run_that_ends_early_has_a_checkpoint_and_stays_at_its_end(
    settings, last, evaluated, interrupted_at, tmp_path, monkeypatch
):
    job, parts = small_run(tmp_path, steps=9, dev_questions=2, save_every=2, **settings)
    scores, pending = [0.1, 0.5, 0.25, 0.75, 0.5, 0.25, 1.0], [interrupted_at]
    steps = []

    def roll_out(method, environment, questions, step):
        if step == pending[0]:
            pending[0] = None
            raise KeyboardInterrupt
        steps.append(step)
        return roll_out_nothing(method, environment, questions, step)

    monkeypatch.setattr(ROLL_OUT, roll_out)
    monkeypatch.setattr(loop, "describe_rollout", lambda *_: {"policy_tokens": 10.0})
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: result(scores[steps[-1]]))
    if interrupted_at is not None:
        with pytest.raises(KeyboardInterrupt):
            loop.train(job, parts, tmp_path)
    for _ in range(2):
        loop.train(job, parts, tmp_path)
        rows = read_metrics(tmp_path)
        assert [row["step"] for row in rows] == list(range(1, last + 1))
        assert [row["step"] for row in rows if SCORE in row] == evaluated
        assert Checkpoints(tmp_path).latest() == last and steps[-1] == last - 1
