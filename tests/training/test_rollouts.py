"""Rollouts made during the update before, and the guard: a resumed run ends as a whole one."""

import functools
import itertools
import json
import pathlib
import signal
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jax_ragrl.corpus.questions import QuestionStream
from jax_ragrl.errors import Preempted, UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.config import Job
from jax_ragrl.training import loop
from jax_ragrl.training import rollouts as rollouts_module
from jax_ragrl.training.rollouts import Rollout, Rollouts
from jax_ragrl.training.setup import method_of
from jax_ragrl.types import Question
from tests.jobs import config_job
from tests.rollout.tape import ANN, BOB, PAPER, Tape, improvise, play
from tests.training.test_outage import ROLL_OUT
from tests.training.trial import Trial, guard, seeded_rows

pytestmark = pytest.mark.filterwarnings("ignore:guard.dead_groups")
PHASES = [{"steps": 2, "roles": ["router"]}, {"steps": 9, "roles": ["filter", "decision"]}]


@pytest.fixture
def trial(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    return Trial(tmp_path, monkeypatch)


def test_fresh_rollouts_come_from_the_newest_policies(trial):
    trial.train(staleness=0, steps=4)
    assert trial.steps_and_weights()[1:] == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert trial.rows("staleness") == [0] * 4 and set(trial.threads.values()) == {"MainThread"}
    checkpoints = Checkpoints(trial.folder)
    assert checkpoints.meta(3)["contents"] == checkpoints.meta(4)["contents"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [1, 2])
def test_a_resumed_run_trains_on_the_forest_that_was_in_flight(trial, save_every):
    """The language model answers differently each time: a second rollout would differ."""
    trial.interrupted_at = 2
    with pytest.raises(KeyboardInterrupt):
        trial.train(save_every=save_every)
    assert Checkpoints(trial.folder).latest() == 2
    before = len(trial.sampled)
    assert before in (3, 4)  # step 3 had begun, or was stopped before its first call
    trial.train(save_every=save_every)
    assert [step for step, *_ in trial.sampled[before:]] == [3, 4]
    assert [step for step, _ in trial.learned] == [0, 1, 2, 3, 4]
    assert trial.rows("staleness") == [0, 1, 1, 1, 1]
    # A run that was never interrupted has the same questions.
    ids = {step: ids for step, ids, _ in trial.sampled}
    assert all(ids[s] == [q.id for q in f.questions] for s, f in trial.learned)
    assert len({tuple(own) for own in ids.values()}) == 5


def test_sigterm_ends_a_run_after_its_step_which_is_saved(trial, monkeypatch):
    def learn(*args):
        if args[-1] == 2:
            signal.raise_signal(signal.SIGTERM)
        return trial.learn(*args)

    monkeypatch.setattr(loop, "learn", learn)
    with pytest.raises(Preempted, match="stopped after step 3: the same command continues"):
        trial.train(save_every=100)
    assert Checkpoints(trial.folder).latest() == 3
    trial.train(save_every=100)
    assert [step for step, _ in trial.learned] == [0, 1, 2, 3, 4]


@functools.cache
def job() -> Job:
    return config_job("tiny/c3po")


def rollouts_of_one_epoch() -> Rollouts:
    return Rollouts(
        method=method_of(job()),
        data=QuestionStream([ANN, BOB] * 3, 0),
        questions_per_step=6,
        steps=9,
        staleness=1,
        act=lambda *_: Tape(improvise).environment(),
    )


def test_stale_rollouts_come_from_the_policies_before_the_last_update_within_a_phase(trial):
    trial.train(steps=5, phases=PHASES)
    (_, initial), *rest = trial.steps_and_weights()
    assert rest == [(1, initial), (2, 2.0), (3, 2.0), (4, 3.0)]
    assert trial.rows("staleness") == [0, 1, 0, 1, 1]
    own, thread = "MainThread", "rollout_0"
    assert [trial.threads[step] for step in range(5)] == [own, thread, own, thread, thread]


@pytest.mark.filterwarnings("ignore:guard.grad_norm")
def test_an_undone_update_leaves_the_rollouts_in_flight_fresh(trial):
    trial.norms = [1, 1, 50, 1, 1]
    trial.train(guard=guard("undo"))
    # Step 3 was rolled out once, by the policies before the undone update, which it then trains.
    (_, initial), *rest = trial.steps_and_weights()
    assert rest == [(1, initial), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert trial.rows("staleness") == [0, 1, 1, 0, 1]
    assert trial.rows("guard/rate_factor")[2:] == [0.25] * 3


def test_rollouts_that_a_resumed_run_could_not_read_are_not_saved(monkeypatch):
    forest = play(Tape(improvise), ANN, expander=PAPER, seed=3)
    rollouts = rollouts_of_one_epoch()
    monkeypatch.setattr(ROLL_OUT, lambda *_: forest._replace(records=(Trial.rows,)))
    monkeypatch.setattr(rollouts_module, "gather", lambda method, questions, shard: shard())
    rollouts.begin({}, 1)
    with pytest.raises(UserError, match="function, which other processes"):
        rollouts.state()


@pytest.mark.slow
def test_an_outage_in_flight_is_not_saved(trial):
    trial.fails_at = {2, 3, 4, 5, 6}
    with pytest.raises(UserError, match=r"5 steps in a row .* no route"):
        trial.train(steps=8)
    assert Checkpoints(trial.folder).latest() == 2
    trial.sampled, trial.fails_at = [], set()
    trial.train(steps=8)
    # Step 2 is rolled out again, by the policies of the checkpoint.
    assert trial.steps_and_weights()[:2] == [(2, 2.0), (3, 2.0)]
    assert trial.rows("staleness") == [0, 1, 0, 1, 1, 1, 1, 1] and trial.rows("failed") == [0] * 8


def test_an_error_in_flight_comes_after_the_step_is_saved(trial, monkeypatch):
    roll_out = trial.roll_out

    def fail(method, environment, questions, step):
        if step == 2:
            raise UserError("no such model")
        return roll_out(method, environment, questions, step)

    monkeypatch.setattr(ROLL_OUT, fail)
    with pytest.raises(UserError, match="no such model"):
        trial.train()
    assert Checkpoints(trial.folder).latest() == 2 and trial.rows("staleness") == [0, 1]


def test_a_run_that_ends_early_makes_no_further_rollouts(trial, monkeypatch):
    monkeypatch.setattr(loop, "dev_metrics", lambda *_: {"eval/accuracy": 0.5})
    trial.train(steps=9, patience=2, eval_every=1)
    # The policies before training have the score, too.
    assert [step for step, _ in trial.learned] == [0, 1]
    assert Checkpoints(trial.folder).meta(2)["contents"] == {}


def test_the_times_of_a_step_count_each_second_once():
    causes = {"device": 2.0, "llm": 3.0, "retriever": 0.5, "host": 0.25}
    laps = {"time/wait_rollout_s": 1.0, "time/rollout_s": 0.5, "time/train_s": 7.0}
    metrics = Rollout(play(Tape(improvise)), causes, 1, early_wait=4.0).metrics(laps)
    assert metrics == {
        "staleness": 1.0,
        **{f"time/wait_{cause}_s": seconds for cause, seconds in causes.items()},
        "time/wait_rollout_s": 5.0,  # in the step, and before it for an evaluation or a save
        "time/rollout_s": 6.25,  # the causes and the credit
        "time/train_s": 7.0,
        "time/step_s": 12.5,  # waiting, credit and update
    }


def test_waiting_before_a_step_counts_for_its_rollouts(monkeypatch):
    rollouts = rollouts_of_one_epoch()
    monkeypatch.setattr(ROLL_OUT, lambda *_: play(Tape(improvise)))
    rollouts.begin({}, 1)
    ticks = itertools.count(0, 10)
    monkeypatch.setattr(rollouts_module, "time", SimpleNamespace(perf_counter=ticks.__next__))
    rollouts.wait()
    rollouts.wait()
    assert rollouts.take({}, 1).early_wait == 20
    rollouts.begin({}, 2)
    assert rollouts.take({}, 2).early_wait == 0


def test_all_processes_gather_a_forest_once_in_the_main_thread(monkeypatch):
    """A message of the worker thread could overtake one of the update on another process."""
    gathered = []

    def gather(_, questions: Sequence[Question], shard: Callable[[], Forest]) -> Forest:
        gathered.append((threading.current_thread().name, [q.id for q in questions]))
        forest = shard()
        return forest._replace(reward_N=np.full_like(forest.reward_N, 99))

    monkeypatch.setattr(ROLL_OUT, lambda *_: play(Tape(improvise)))
    monkeypatch.setattr(rollouts_module, "gather", gather)
    rollouts = rollouts_of_one_epoch()
    rollouts.begin({}, 1)
    rollouts.wait()
    entries = rollouts.state()
    for owner in (rollouts, rollouts_of_one_epoch()):
        owner.restore(entries, 1)
        assert set(owner.take({}, 1).forest.reward_N) == {99}
    assert len(gathered) == 1 and gathered[0][0] == "MainThread"
    assert gathered[0][1] == [q.id for q in QuestionStream([ANN, BOB] * 3, 0).draw(6)]


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


def test_a_stopped_run_does_not_save_the_steps_beyond_the_threshold(trial):
    with (
        pytest.warns(UserWarning, match="action: stop"),
        pytest.raises(UserError, match=r"grad_norm is 50.*incidents.*train --from"),
    ):
        train(trial, "stop", [1, 1, 50, 50, 1], save_every=1)
    assert Checkpoints(trial.folder).latest() == 2 and len(seeded_rows(trial.folder)) == 4


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
        ends.append((trial.updates(), weights, seeded_rows(trial.folder), trial.rates[-1]))
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
        ends.append((trial.updates(), seeded_rows(trial.folder), trial.rates[-1]))
    assert ends[0][0] == {4} and ends[0][1][6]["guard/incident/dev_drop"] > 10
    assert ends[0] == ends[1]
    file = json.loads((trial.folder / "incidents" / "step-6.json").read_text())
    assert [x["indicator"] for x in file["incidents"]] == ["grad_norm", "dev_drop"]
    assert file["questions"], "the batch of the step is kept"
