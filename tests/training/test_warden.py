"""Each action of the guard changes the training as it says, in a resumed run as in a whole one."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.run.checkpoint_name import RunCheckpoint
from jax_ragrl.run.indicators import UNDOS
from jax_ragrl.run.load import load_job
from jax_ragrl.training import loop
from jax_ragrl.training.warden import questions_of
from tests.rollout.tape import ANN, BOB, Tape, play
from tests.training.test_best import moved, weights
from tests.training.test_outage import ROLL_OUT, roll_out_nothing, small_run, small_values


class Trial:
    """Runs whose parameters all equal the number of updates that were applied to them."""

    def __init__(self, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.rates = folder, list[object]()
        self.interrupted_at: int | None = None
        self.guard: dict[str, object] = {}  # further limits
        _, self.parts = small_run(folder, steps=1)
        monkeypatch.setattr(ROLL_OUT, roll_out_nothing)
        monkeypatch.setattr(loop, "learn", self.learn)

    def learn(self, method, policies, forest, turns, step):
        if step == self.interrupted_at:
            self.interrupted_at = None
            raise KeyboardInterrupt
        (policy,) = policies.values()
        self.rates.append(policy.spec.policy.optimizer)
        first = jax.device_get(jax.tree.leaves(policy.state.policy.params)[0])
        count = first.flat[0] if step else 0
        return moved(policies, count), {"grad_norm": self.norms[step]}

    def train(self, action: str, norms: list[float], **run: int) -> None:
        """Trains with an action on the norms of the gradient of the steps."""
        limit = {"threshold": 10.0, "action": action}
        guard = {"baseline_steps": 2, "patience": 2, "grad_norm": limit} | self.guard
        self.norms = norms
        changes = {"steps": len(norms), "dev_questions": 0, "save_every": 2} | run
        self.job = load_job(small_values(self.folder, **changes) | {"guard": guard})
        loop.train(self.job, self.parts, self.folder)

    def updates(self) -> set[float]:
        """Returns the number of updates of the newest checkpoint."""
        return weights(RunCheckpoint(self.folder), self.job, self.parts)

    def rows(self) -> list[dict[str, float]]:
        """Returns the logged metrics without durations."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [
            {k: v for k, v in row.items() if not k.startswith(("time/", "compile/"))}
            for row in rows
        ]


@pytest.fixture
def trial(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    return Trial(tmp_path, monkeypatch)


def test_a_warning_changes_nothing_but_leaves_an_incident_file(trial: Trial):
    with pytest.warns(UserWarning, match=r"guard\.grad_norm at step 4.*action: warn"):
        trial.train("warn", [1, 1, 50, 50, 1])
    assert trial.updates() == {5}
    file = json.loads((trial.folder / "incidents" / "step-4.json").read_text())
    assert file["incidents"][0]["number"] == 50 and file["metrics"]["grad_norm"] == 50
    assert len(file["questions"]) == 2 and file["questions"][0]["question"]
    assert [row.get("guard/incident/grad_norm") for row in trial.rows()] == [None] * 3 + [50, None]


def test_an_undone_update_is_not_applied_and_lowers_the_rate(trial: Trial):
    with pytest.warns(UserWarning, match="action: undo"):
        trial.train("undo", [1, 1, 50, 50, 1, 1])
    assert trial.updates() == {4}
    optimizer, updates = trial.job.optimizer, trial.job.run.steps
    rates = [optimizer.transform(optimizer.policy_lr * x, updates) for x in (1, 0.25, 0.0625)]
    assert trial.rates == [rates[0]] * 3 + [rates[1]] + [rates[2]] * 2
    assert trial.rows()[-1]["guard/rate_factor"] == 0.0625


def test_updates_are_not_undone_for_ever(trial: Trial):
    with (
        pytest.warns(UserWarning, match="action: stop"),
        pytest.raises(UserError, match=r"grad_norm is 50.*train --from"),
    ):
        trial.train("undo", [1, 1] + [50] * (UNDOS + 2))
    assert len(trial.rows()) == 2 + UNDOS + 1 and trial.updates() == {2}


def test_a_stopped_run_does_not_save_the_steps_beyond_the_threshold(trial: Trial):
    with (
        pytest.warns(UserWarning, match="action: stop"),
        pytest.raises(UserError, match=r"grad_norm is 50.*incidents.*train --from"),
    ):
        trial.train("stop", [1, 1, 50, 50, 1], save_every=1)
    assert Checkpoints(trial.folder).latest() == 2 and len(trial.rows()) == 4


@pytest.mark.filterwarnings("ignore:guard.grad_norm")
def test_an_interrupted_run_ends_as_a_whole_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    norms = [1, 1, 50, 50, 1, 50, 1]
    ends = []
    for stop in (None, 3, 4, 5):
        trial = Trial(tmp_path / str(stop), monkeypatch)
        trial.interrupted_at = stop
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                trial.train("undo", norms)
        trial.train("undo", norms)
        ends.append((trial.updates(), trial.rows(), trial.rates[-1]))
    assert all(end == ends[0] for end in ends[1:])


@pytest.mark.filterwarnings("ignore:guard")
def test_a_fallen_dev_score_stops_an_interrupted_run_as_a_whole_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """Step 6 has a gradient and a score beyond their thresholds."""
    scores = {0: 0.4, 2: 0.5, 4: 0.9, 6: 0.1}

    def evaluate(job, parts, policies, monitor, workdir, step):
        return {"eval/accuracy": scores[step], "eval/standard_error": 0.05}

    ends = []
    for stop in (None, 4, 5):
        trial = Trial(tmp_path / str(stop), monkeypatch)
        monkeypatch.setattr(loop, "dev_metrics", evaluate)
        limit = {"threshold": 2.5, "action": "stop"}
        trial.guard, trial.interrupted_at = {"dev_drop": limit}, stop
        norms = [1, 1, 1, 1, 50, 50, 1, 1]
        if stop is not None:
            with pytest.raises(KeyboardInterrupt):
                trial.train("warn", norms, eval_every=2, eval_before_training=True)
        with pytest.raises(UserError, match=r"guard\.dev_drop at step 6.*action: stop"):
            trial.train("warn", norms, eval_every=2, eval_before_training=True)
        ends.append((trial.updates(), trial.rows(), trial.rates[-1]))
    assert ends[0][0] == {4} and ends[0][1][6]["guard/incident/dev_drop"] > 10
    assert all(end == ends[0] for end in ends[1:])
    file = json.loads((trial.folder / "incidents" / "step-6.json").read_text())
    assert [x["indicator"] for x in file["incidents"]] == ["grad_norm", "dev_drop"]
    assert file["questions"], "the batch of the step is kept"


def test_an_incident_file_summarizes_each_rollout():
    forest = play(Tape(lambda *_: "[No Retrieval]"), ANN, BOB)
    first, second = questions_of(forest)
    assert (first["id"], second["id"]) == (ANN.id, BOB.id)
    assert all(x["rollouts"] and x["actions"] and x["failure"] == "" for x in (first, second))
    assert {"role", "text", "error"} <= first["actions"][0].keys()
