"""SIGTERM ends a command within seconds, whatever it does, with one line."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jax_ragrl.runtime import stopping

REPO = pathlib.Path(__file__).parents[2]
# Commands whose work sleeps in Python, in C, in another thread, or after an exception.
PROGRAM = """
import sys, threading, time, ctypes
from jax_ragrl.cli import data, main
from jax_ragrl.runtime import stopping
stopping.GRACE = 0.5

def sleep(options):
    print("works", flush=True)
    time.sleep(60)

def compile_long(options):
    print("works", flush=True)
    ctypes.CDLL(None).sleep.argtypes = [ctypes.c_uint]
    for _ in range(60):
        ctypes.CDLL(None).usleep(60_000_000)  # no handler of Python runs before its end

def ask_server(options):
    threading.Thread(target=time.sleep, args=[60]).start()  # joined when Python exits
    sleep(options)

def swallow(options):
    try:
        sleep(options)
    except Exception:
        sleep(options)

def collect_garbage(options):
    import gc
    def work(*_):  # as JAX does; Python drops what a callback raises
        if gc.callbacks:
            gc.callbacks.clear()
            sleep(options)
    gc.callbacks.append(work)
    gc.collect()
    time.sleep(60)

def finish_step(options):
    from jax_ragrl.run.preemption import stop_notice
    from jax_ragrl.errors import Preempted
    with stop_notice() as notice:
        print("works", flush=True)
        while not notice.reached(1):
            time.sleep(0.01)
        time.sleep(1)
        raise Preempted("stopped after step 1: the same command continues")

data.run_world = globals()[sys.argv[1]]
sys.exit(main.main(["data", "world", "--out", sys.argv[2]]))
"""


def run(work: str, folder: pathlib.Path, signals: int = 1) -> tuple[int, list[str], float]:
    """Returns the exit code, the lines on stderr and the seconds after the signal."""
    command = [sys.executable, "-c", PROGRAM, work, str(folder / "w")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": REPO}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "works\n"
        time.sleep(0.2)
        start = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        _, errors = process.communicate(timeout=50)
        return process.returncode, errors.splitlines(), time.monotonic() - start


@pytest.mark.parametrize(
    "work", ["sleep", "compile_long", "ask_server", "swallow", "collect_garbage"]
)
def test_every_command_ends_within_seconds_with_one_line(tmp_path: pathlib.Path, work: str):
    code, lines, seconds = run(work, tmp_path)
    assert (code, lines) == (143, [f"ragrl: {stopping.LINE}"]) and seconds < 30


def test_a_training_prints_a_line_at_once_and_finishes_its_step(tmp_path: pathlib.Path):
    code, lines, _ = run("finish_step", tmp_path)
    assert code == 143 and len(lines) == 2
    assert "stops after its step, which is saved" in lines[0]
    assert lines[1].startswith("ragrl: stopped after step 1")


@pytest.mark.parametrize("work", ["finish_step", "compile_long"])
def test_a_second_sigterm_ends_at_once(tmp_path: pathlib.Path, work: str):
    code, lines, _ = run(work, tmp_path, signals=2)
    assert code in (143, -signal.SIGTERM) and len(lines) == 1


def test_the_handler_of_the_caller_is_restored():
    before = signal.getsignal(signal.SIGTERM)
    files = len(os.listdir("/proc/self/fd"))
    with stopping.ends_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    time.sleep(0.2)
    assert len(os.listdir("/proc/self/fd")) <= files
