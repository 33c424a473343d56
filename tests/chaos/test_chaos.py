"""A small fixed share of the harness; `python -m tests.chaos` does the whole."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import time

import jax
import numpy as np
import pytest

from jax_ragrl.learner.checkpoint import Checkpoints
from tests.chaos import damages, kills, limited_disk, servers
from tests.chaos.runs import Outcome, Variant, call, digest, train_command

pytestmark = pytest.mark.optimized
# One damage per kind of file.
DAMAGES = (
    "largest:checkpoints/4/state: bit flipped",
    "checkpoints/4/meta/metadata: cut",
    "metrics.jsonl: binary tail",
    "config.json: cut",
    "index/vectors/c/0/0: bit flipped",
    ".lock: binary",
)
SHORT = {"run.steps": 3, "run.eval_every": 3, "run.dev_questions": 0}
DEADLINE = 300  # seconds for the run that gets no answer
C3PO = Variant("c3po")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a finished run in `whole`, made in this process, which compiles only once."""
    folder = tmp_path_factory.mktemp("c3po")
    outcome = call(train_command(C3PO, folder / "whole"), folder / "whole")
    assert outcome.is_success, outcome.output
    return folder


@pytest.mark.slow
def test_killed_and_paused_runs_end_as_undisturbed_ones(tmp_path: pathlib.Path):
    for result in kills.torment(Variant("coda"), tmp_path, kills=2, seed=1):
        assert not [d for d in result.disturbances if d.fault], result
        assert result.is_equal, result


@pytest.mark.slow
def test_a_damaged_run_is_mended_or_its_damage_is_named(folder: pathlib.Path):
    results = damages.hurt(C3PO, folder, DAMAGES, train_only=True)
    assert len(results) == len(DAMAGES)
    assert not [result for result in results if not result.is_good]


@pytest.mark.slow
def test_a_full_disk_is_named_and_the_run_continues_as_if_there_had_been_space(
    folder: pathlib.Path, tmp_path: pathlib.Path
):
    expected = digest(folder / "whole")
    result = limited_disk.with_small_files(C3PO, tmp_path / "run", "a checkpoint", expected)
    assert result.is_named, result.first
    assert result.actual == expected


@pytest.mark.slow
def test_faults_that_pass_change_nothing_and_an_outage_stops_the_run(tmp_path: pathlib.Path):
    kinds = [name for name in servers.PASSING if "hangs" not in name]

    def run(name: str, share: float) -> servers.Faulty:
        own = servers.Servers(tmp_path / "index", share, kinds, seed=0)
        return servers.run_with_faults(name, tmp_path / name, own, SHORT, DEADLINE, in_process=True)

    whole, faulty = run("whole", 0.0), run("faulty", 0.3)
    assert whole.outcome.is_success and faulty.outcome.is_success, faulty.outcome
    assert sum(faulty.counts.values()) > 5 and faulty.failed == 0
    assert digest(tmp_path / "whole") == digest(tmp_path / "faulty")
    outage = run("outage", 1.0)
    assert outage.outcome.codes == (2,) and not outage.outcome.is_late, outage.outcome
    # The first requests succeed, so an early step may be saved; the last one may not.
    assert not outage.outcome.has_traceback and SHORT["run.steps"] not in outage.saved


@pytest.mark.slow
def test_odd_replies_fail_their_questions_and_end_no_run(tmp_path: pathlib.Path):
    """From the first request on: a server need not have answered before."""
    kinds = [*servers.ODD, "odd page", "no port", "moved"]
    own = servers.Servers(tmp_path / "index", 0.1, kinds, seed=1, after=0)
    changes = {"run.steps": 2, "run.questions_per_step": 6, "run.dev_questions": 0}
    result = servers.run_with_faults("odd", tmp_path / "odd", own, changes, 300, in_process=True)
    assert result.outcome.is_success and not result.outcome.has_traceback, result.outcome
    assert sum(result.counts.values()) > 3 and 0 < result.failed < 12 and result.steps == 2


def test_there_are_enough_kinds_of_faults():
    assert len(servers.ALL) >= 40


def test_a_run_whose_checkpoint_has_a_renamed_array_equals_no_other(tmp_path: pathlib.Path):
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(4, jax.device_put({"weight": np.ones(2, np.float32)}), {})
    for name in ("metrics.jsonl", "trees.jsonl"):
        (tmp_path / name).touch()
    before = digest(tmp_path)
    file = tmp_path / "checkpoints" / "4" / "meta" / "metadata"
    file.write_text(file.read_text().replace('"weight": [2]', '"waight": [2]'))
    after = digest(tmp_path)
    assert not before.startswith("unreadable") and after.startswith("unreadable")


@pytest.mark.parametrize(
    "outcome, is_equal, expected",
    [
        (Outcome((0,), ""), True, "mended"),
        (Outcome((0,), ""), False, "another result, silently"),
        (Outcome((0,), "ragrl: checkpoint 4 is damaged"), False, "named"),
        (Outcome((2,), "ragrl: checkpoint 4 is damaged"), True, "named"),
        (Outcome((2,), "no"), True, "another result, silently"),
        (Outcome((1,), "Traceback (most recent call last):\n"), True, "traceback"),
        (Outcome((-9,), "", is_late=True), True, "hangs"),
        (Outcome((1,), ""), True, "exit code (1,)"),
    ],
)
def test_the_verdict_on_an_end(outcome: Outcome, is_equal: bool, expected: str):
    assert damages.verdict(outcome, lambda: is_equal) == expected


@pytest.mark.parametrize(
    "name, outcome, part",
    [
        ("SIGKILL", Outcome((-9, -9), ""), ""),
        ("SIGTERM", Outcome((143,), ""), ""),
        ("SIGSTOP", Outcome((0,), ""), ""),
        ("SIGSTOP", Outcome((1,), ""), "exit code 1"),
        ("SIGINT", Outcome((130,), "Traceback (most recent call last):\n"), "traceback"),
        ("SIGKILL", Outcome((-9,), "", is_late=True), "did not end"),
    ],
)
def test_the_fault_of_an_end_after_a_signal(name: str, outcome: Outcome, part: str):
    fault = kills.fault_of(name, outcome)
    assert part in fault and bool(fault) == bool(part)


class StubGroup:
    """Processes that live for some seconds and record the signals that they receive."""

    def __init__(self, seconds: float) -> None:
        self._end, self.signals = time.monotonic() + seconds, []

    def lives(self) -> bool:
        return time.monotonic() < self._end

    def send(self, number: int) -> None:
        self.signals.append(number)

    def end(self) -> Outcome:
        return Outcome((0,), "")


def test_a_pause_ends_and_a_signal_to_an_ended_run_does_not_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kills, "PAUSE", 0.01)
    group = StubGroup(60)
    assert kills._disturb(group, "SIGSTOP", 0.0)[0]
    assert group.signals == [signal.SIGSTOP, signal.SIGCONT]
    ended = StubGroup(0)
    assert not kills._disturb(ended, "SIGKILL", 1.0)[0] and not ended.signals
