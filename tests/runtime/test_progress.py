"""A command says how far it is, not only on a terminal, and is never silent for 20 seconds."""

import io
import sys
import threading
import time

import pytest

from jax_ragrl.cli import config
from jax_ragrl.cli.main import main
from jax_ragrl.rollout.collect import collect
from jax_ragrl.rollout.expand import single_chain
from jax_ragrl.runtime import progress
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.systems.baselines.standard import StandardRAG
from tests.rollout.tape import ANN, BOB, Tape


@pytest.fixture
def impatient(monkeypatch):
    """Half a second without output counts as silence."""
    monkeypatch.setattr(progress, "SILENCE", 0.5)
    monkeypatch.setattr(progress, "LOOK", 0.05)


def lines_of(capsys) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_a_line_has_the_pace_and_the_time_left_in_its_largest_unit():
    now = [0.0]
    task = progress.Task("embed", "passage", 4000, clock=lambda: now[0])
    now[0] = 19.0
    assert task.line() == "embed: 0 of 4,000 passages, 19 s so far"
    now[0] = 30.0
    task.update(300)
    assert task.line() == "embed: 300 of 4,000 passages, 10.0 per s, about 6 min left"
    task = progress.Task("train", "step", 12, initial=2, clock=lambda: now[0])
    now[0] += 221.0
    task.update(1)
    assert task.line() == "train: 3 of 12 steps, 221.0 s per step, about 33 min left"
    now[0] += 180.0
    assert task.line() == "train: 3 of 12 steps, 221.0 s per step, about 30 min left"
    now[0] += 70.0
    assert task.line() == "train: 3 of 12 steps, 471.0 s per step, about 71 min left"
    task.update(9)
    now[0] += 20.0  # the work is over, but not what follows it
    assert task.line().endswith(" s per step")
    task = progress.Task("read", "batch", clock=lambda: now[0])
    now[0] += 40.0
    task.update(80)
    assert task.line() == "read: 80 batches, 2.0 per s"
    texts = [progress.duration(seconds) for seconds in (5, 119, 120, 7199, 7200)]
    assert texts == ["5 s", "119 s", "2 min", "120 min", "2 h"]


def test_a_short_loop_prints_nothing_without_a_terminal(capsys):
    assert list(progress.track(range(3), "read", "passage")) == [0, 1, 2]
    assert lines_of(capsys) == []


@pytest.mark.usefixtures("impatient")
def test_every_command_breaks_its_silence(capsys, monkeypatch):
    def run(_options):
        time.sleep(0.8)  # as while JAX is imported
        with progress.progress("fine-tune", "step", 12), report_compiling("update 2 x 8"):
            time.sleep(0.8)

    monkeypatch.setattr(config, "run_config", run)
    assert main(["config", "show", "x.py"]) == 0
    first, *_, last = lines_of(capsys)
    assert first.startswith("ragrl: config show: ") and first.endswith("s so far")
    assert "fine-tune: 0 of 12 steps" in last and "compile or run update 2 x 8: " in last
    assert "config" not in last and not progress._open
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.usefixtures("impatient")
def test_output_of_any_kind_is_no_silence_and_a_server_that_is_ready_may_be_silent(capsys):
    with progress.heartbeat("train"):
        for i in range(12):
            print("step", i, file=(sys.stdout, sys.stderr)[i % 2])
            time.sleep(0.1)
    assert [line for line in lines_of(capsys) if "so far" in line] == []
    with progress.heartbeat("serve"):
        progress.fall_silent()
        with progress.progress("sample", "prompt", 3):
            time.sleep(0.8)
    assert lines_of(capsys) == []


@pytest.mark.usefixtures("impatient")
def test_a_loop_of_a_program_without_commands_breaks_its_silence(capsys):
    for _ in progress.track(range(2), "embed", "passage", 2):
        time.sleep(0.8)
    assert "embed: 0 of 2 passages, 1 s so far" in lines_of(capsys)[0]


@pytest.mark.usefixtures("impatient")
def test_a_terminal_has_its_bar_drawn_again(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.heartbeat("train"), progress.progress("train", "step", 12):
        time.sleep(2.2)
    assert "00:02" in terminal.getvalue() and "so far" not in terminal.getvalue()


def test_questions_count_as_they_end():
    class Slow(Tape):
        counts: list[int] = []

        def complete(self, requests):
            self.counts.append(bar.done)
            return super().complete(requests)

    tape = Slow({}, replies={"answer": "x"})
    environment = tape.environment()
    with progress.progress("answer", "question", 2) as bar:
        collect(StandardRAG("c3po_tiny", 2), single_chain, [ANN, BOB], environment)
    assert tape.counts == [0] and bar.done == 2


def test_both_streams_of_a_command_may_be_one(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.heartbeat("train"):
        print("step 1")
    print("done")
    assert stream.getvalue() == "step 1\ndone\n"
