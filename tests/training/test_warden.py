"""Each action of the guard changes the training as it says, in a resumed run as in a whole one."""

import itertools
import json
import pathlib
from typing import Any

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.run.indicators import UNDOS
from jax_ragrl.training import loop
from jax_ragrl.training.warden import questions_of
from tests.rollout.tape import ANN, BOB, Tape, play
from tests.training.trial import Trial, guard

pytestmark = pytest.mark.filterwarnings("ignore:guard.dead_groups")


@pytest.fixture
def trial(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    return Trial(tmp_path, monkeypatch)


def train(trial: Trial, action: str, norms: list[float], **run: Any) -> None:
    trial.norms = norms
    settings = {"staleness": 0, "steps": len(norms), "save_every": 2, "guard": guard(action)}
    trial.train(**settings | run)


def test_a_warning_changes_nothing_but_leaves_an_incident_file(trial):
    with pytest.warns(UserWarning, match=r"guard\.grad_norm at step 4.*action: warn"):
        train(trial, "warn", [1, 1, 50, 50, 1])
    assert trial.updates() == {5}
    file = json.loads((trial.folder / "incidents" / "step-4.json").read_text())
    assert file["incidents"][0]["number"] == 50 and file["metrics"]["grad_norm"] == 50
    assert len(file["questions"]) == 2 and file["questions"][0]["question"]
    assert trial.rows("guard/incident/grad_norm") == [None] * 3 + [50, None]


def test_an_undone_update_is_not_applied_and_lowers_the_rate(trial):
    with pytest.warns(UserWarning, match="action: undo"):
        train(trial, "undo", [1, 1, 50, 50, 1, 1])
    assert trial.updates() == {4}
    optimizer, updates = trial.job.optimizer, trial.job.run.steps
    rates = [optimizer.transform(optimizer.policy_lr * x, updates) for x in (1, 0.25, 0.0625)]
    assert trial.rates == [rates[0]] * 3 + [rates[1]] + [rates[2]] * 2
    assert trial.rows("guard/rate_factor")[-1] == 0.0625


def test_updates_are_not_undone_for_ever(trial):
    with (
        pytest.warns(UserWarning, match="action: stop"),
        pytest.raises(UserError, match=r"grad_norm is 50.*train --from"),
    ):
        train(trial, "undo", [1, 1] + [50] * (UNDOS + 2))
    assert len(trial.all_rows()) == 2 + UNDOS + 1 and trial.updates() == {2}


def test_a_stopped_run_does_not_save_the_steps_beyond_the_threshold(trial):
    with (
        pytest.warns(UserWarning, match="action: stop"),
        pytest.raises(UserError, match=r"grad_norm is 50.*incidents.*train --from"),
    ):
        train(trial, "stop", [1, 1, 50, 50, 1], save_every=1)
    assert Checkpoints(trial.folder).latest() == 2 and len(trial.all_rows()) == 4


@pytest.mark.filterwarnings("ignore:guard.grad_norm")
@pytest.mark.parametrize("staleness", [0, 1])
def test_an_interrupted_run_ends_as_a_whole_one(staleness, tmp_path, monkeypatch):
    ends = []
    for stop in (None, 3, 5):
        trial = Trial(tmp_path / str(stop), monkeypatch)
        trial.interrupted_at, trial.replies = stop, itertools.repeat(0)
        norms = [1, 1, 50, 1, 50, 1, 1]
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                train(trial, "undo", norms, staleness=staleness)
        train(trial, "undo", norms, staleness=staleness)
        weights = {step: weight for step, _, weight in trial.sampled}
        ends.append((trial.updates(), weights, trial.all_rows(), trial.rates[-1]))
    assert all(end == ends[0] for end in ends[1:])


@pytest.mark.filterwarnings("ignore:guard")
def test_a_fallen_dev_score_stops_an_interrupted_run_as_a_whole_one(tmp_path, monkeypatch):
    """Step 6 has a gradient and a score beyond their thresholds."""
    scores = {0: 0.4, 2: 0.5, 4: 0.9, 6: 0.1}

    def evaluate(job, parts, policies, monitor, workdir, step):
        return {"eval/accuracy": scores[step], "eval/standard_error": 0.05}

    ends = []
    for stop in (None, 5):
        trial = Trial(tmp_path / str(stop), monkeypatch)
        monkeypatch.setattr(loop, "dev_metrics", evaluate)
        trial.interrupted_at, trial.replies = stop, itertools.repeat(0)
        limits = guard("warn", dev_drop={"threshold": 2.5, "action": "stop"})
        norms, often = [1, 1, 1, 1, 50, 50, 1, 1], {"eval_every": 2, "guard": limits}
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                train(trial, "warn", norms, **often)
        with pytest.raises(UserError, match=r"guard\.dev_drop at step 6.*action: stop"):
            train(trial, "warn", norms, **often)
        ends.append((trial.updates(), trial.all_rows(), trial.rates[-1]))
    assert ends[0][0] == {4} and ends[0][1][6]["guard/incident/dev_drop"] > 10
    assert ends[0] == ends[1]
    file = json.loads((trial.folder / "incidents" / "step-6.json").read_text())
    assert [x["indicator"] for x in file["incidents"]] == ["grad_norm", "dev_drop"]
    assert file["questions"], "the batch of the step is kept"


def test_an_incident_file_summarizes_each_rollout():
    forest = play(Tape(lambda *_: "[No Retrieval]"), ANN, BOB)
    first, second = questions_of(forest)
    assert (first["id"], second["id"]) == (ANN.id, BOB.id)
    assert all(x["rollouts"] and x["actions"] and x["failure"] == "" for x in (first, second))
    assert {"role", "text", "error"} <= first["actions"][0].keys()
