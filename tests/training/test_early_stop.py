"""A run ends when its score no longer improves, or its tokens are spent, resumed or not."""

import math

import pytest

from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.training import loop
from jax_ragrl.training.early_stop import SCORE, STANDARD_ERROR, Scores
from jax_ragrl.training.log import read_metrics
from tests.training.test_outage import ROLL_OUT, result, roll_out_nothing, small_run


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


@pytest.mark.parametrize(
    "before",
    [
        [],
        [scored(0.5)],
        [scored(0.5, math.nan), scored(None)],
        [scored(1.0, 0.0)],  # no noise to compare with
    ],
)
def test_without_two_standard_errors_there_is_no_drop(before):
    assert Scores(before).drop(scored(0.0, 0.0)) == {}


def test_a_run_ends_by_its_patience_or_its_budget_only():
    scores = Scores([scored(x) | {"policy_tokens": 5} for x in (0.9, 0.5, 0.4, 0.3)])
    assert scores.reason_to_end(0) == scores.reason_to_end(4, 21) == ""
    assert "early stop" in scores.reason_to_end(3)
    assert "has spent its 20 tokens" in scores.reason_to_end(0, 20)
    assert scores.is_spent(21, {"policy_tokens": 1.0}) and not scores.is_spent(21, {})


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
