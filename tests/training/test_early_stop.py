"""A run ends when its score no longer improves, or its tokens are spent, resumed or not."""

from __future__ import annotations

import json
import pathlib

import pytest

from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.training import loop
from jax_ragrl.training.early_stop import (
    SCORE,
    STANDARD_ERROR,
    Scores,
    drop,
    evaluations_without_gain,
    is_spent,
    reason_to_end,
)
from tests.training.test_outage import ROLL_OUT, result, roll_out_nothing, small_run


def rows(*scores: float | None) -> list[dict[str, float | None]]:
    return [{"step": i, "eval/accuracy": score} for i, score in enumerate(scores)]


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
        ((0.5, float("nan")), 0),
    ],
)
def test_only_a_better_score_is_a_gain(scores, count):
    assert evaluations_without_gain(rows(*scores)) == count


def test_steps_without_an_evaluation_do_not_count():
    between = [{"step": 9, "reward/mean": 0.0}] * 5
    assert evaluations_without_gain(rows(0.5) + between + rows(0.4)) == 1


def scored(score: float, error: float) -> dict[str, float]:
    return {"eval/accuracy": score, "eval/standard_error": error}


def test_a_drop_is_counted_in_standard_errors_from_the_best_score():
    before = [scored(0.4, 0.04), {"reward/mean": 0.9}, scored(0.5, 0.03), scored(0.45, 0.04)]
    assert drop(before, scored(0.3, 0.04))["eval/drop"] == pytest.approx(0.2 / 0.05)
    assert drop(before, scored(0.6, 0.04))["eval/drop"] == pytest.approx(-0.1 / 0.05)


@pytest.mark.parametrize(
    "before",
    [
        [],
        [{"eval/accuracy": 0.5}],  # a run from before this metric
        [scored(0.5, float("nan")), {"eval/accuracy": None, "eval/standard_error": None}],
        [scored(1.0, 0.0)],  # no noise to compare with
    ],
)
def test_without_two_standard_errors_there_is_no_drop(before):
    assert drop(before, scored(0.0, 0.0)) == {}


def test_a_run_without_patience_never_ends_early():
    falling = rows(0.9, 0.5, 0.4, 0.3)
    assert reason_to_end(falling, 0) == "" and "early stop" in reason_to_end(falling, 3)
    assert reason_to_end(falling, 4) == ""


@pytest.mark.parametrize("interrupted_at", [None, 2, 4])
def test_a_run_ends_after_its_patience_with_a_checkpoint_and_stays_at_its_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, interrupted_at: int | None
):
    job, parts = small_run(
        tmp_path, steps=9, dev_questions=2, eval_every=1, save_every=2, patience=2
    )
    scores, pending = [0.1, 0.5, 0.25, 0.75, 0.5, 0.25, 1.0], [interrupted_at]
    steps = []

    def roll_out(method, environment, questions, step):
        if step == pending[0]:
            pending[0] = None
            raise KeyboardInterrupt
        steps.append(step)
        return roll_out_nothing(method, environment, questions, step)

    monkeypatch.setattr(ROLL_OUT, roll_out)
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: result(scores[steps[-1]]))
    if interrupted_at is not None:
        with pytest.raises(KeyboardInterrupt):
            loop.train(job, parts, tmp_path)
    for _ in range(2):
        loop.train(job, parts, tmp_path)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert Checkpoints(tmp_path).latest() == 6 and steps[-1] == 5


@pytest.mark.parametrize("interrupted_at", [None, 1])
def test_a_run_ends_with_the_step_that_spends_its_tokens_and_stays_at_its_end(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, interrupted_at: int | None
):
    job, parts = small_run(
        tmp_path, steps=9, dev_questions=2, eval_every=9, save_every=1, token_budget=25
    )
    pending = [interrupted_at]

    def roll_out(method, environment, questions, step):
        if step == pending[0]:
            pending[0] = None
            raise KeyboardInterrupt
        return roll_out_nothing(method, environment, questions, step)

    monkeypatch.setattr(ROLL_OUT, roll_out)
    monkeypatch.setattr(loop, "rollout_metrics", lambda *_: {"policy_tokens": 10.0})
    monkeypatch.setattr(loop, "evaluate_models", lambda *_: result(0.5))
    if interrupted_at is not None:
        with pytest.raises(KeyboardInterrupt):
            loop.train(job, parts, tmp_path)
    for _ in range(2):
        loop.train(job, parts, tmp_path)
        lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [1, 2, 3]  # 20 tokens are below the budget
        assert [SCORE in line for line in lines] == [False, False, True]  # the last is evaluated
        assert Checkpoints(tmp_path).latest() == 3


def test_a_run_without_a_budget_never_spends_it():
    rows = Scores([{"policy_tokens": 10.0}, {"step": 0}, {"policy_tokens": None}])
    assert rows == [] and rows.policy_tokens == 10 and not is_spent(rows, {}, 0)
    assert is_spent(rows, {}, 10) and not is_spent(rows, {}, 11)
    assert is_spent(rows, {"policy_tokens": 1.0}, 11)


def test_scores_that_are_kept_give_the_same_drop():
    rows = [{"step": 1, "loss": 2.0, SCORE: 0.6, STANDARD_ERROR: 0.05}, {"step": 2, "loss": 1.0}]
    metrics = {SCORE: 0.3, STANDARD_ERROR: 0.05}
    assert drop(Scores(rows), metrics) == drop(rows, metrics) != {}
