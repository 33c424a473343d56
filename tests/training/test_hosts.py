"""A run on several hosts, or one that is stopped and killed, equals an undisturbed one."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jax_ragrl.runtime.jsonl import read_rows
from tests.chaos.runs import call, digest, newest_arrays, train_command, wait_for
from tests.flags import flags
from tests.learner.metric_rows import assert_equal_metrics, metric_rows
from tests.tiny import saved_policy

REPO = pathlib.Path(__file__).parents[2]
MESH = "(1, -1, 1)"
# Both processes compile programs for four devices, which takes longer than they compute.
TWO_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(2), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def start_all(command: list[str]) -> list[subprocess.Popen]:
    """Starts two processes of a run, with two devices each."""
    program = [sys.executable, "-m", "jax_ragrl.cli.main", *command, f"--config.mesh={MESH}"]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen(program, cwd=REPO, env=os.environ | TWO_DEVICES | own, **out)
        for own in environments(2)
    ]


def environments(count: int) -> list[dict[str, str]]:
    """Returns the environment variables of each process of one run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    return [
        {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(i),
            # The iteration order of a set of strings must not make the processes differ.
            "PYTHONHASHSEED": str(i + 1),
        }
        for i in range(count)
    ]


def assert_equal_runs(one: pathlib.Path, other: pathlib.Path) -> None:
    assert_equal_metrics(one, other)
    expected, actual = newest_arrays(one), newest_arrays(other)
    assert set(actual) == set(expected) and len(actual) > 10
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.optimized
@pytest.mark.slow
def test_two_hosts_train_like_one_and_the_first_writes_files(tmp_path: pathlib.Path):
    """Weights are split over two devices per host; the KL shows that the gradient is not zero.

    They share the tree of a single question.
    """
    policy, alone, spread = saved_policy(tmp_path), tmp_path / "alone", tmp_path / "spread"
    changes = {"run__questions_per_step": 1}
    outcome = call(train_command(alone, policy, **changes), alone)
    assert outcome.code == 0, outcome
    processes = start_all(train_command(spread, policy, **changes))
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for i, text in enumerate(outputs):
        assert f"process {i} of 2, 2 devices here, 4 in all" in text
        assert ("step 1" in text) == (i == 0)
    files = ({path.name for path in folder.iterdir()} for folder in (alone, spread))
    assert next(files) == next(files)
    assert len(list((spread / "tensorboard").iterdir())) == 1
    assert [row["step"] for row in metric_rows(spread)] == [0, 1, 2, 3]
    assert metric_rows(alone)[-1]["kl/mean"] > 1e-3
    assert_equal_runs(alone, spread)


@pytest.mark.optimized
@pytest.mark.slow
def test_two_hosts_that_are_killed_roll_out_during_updates_like_one(tmp_path: pathlib.Path):
    """The forest of the second step is in the checkpoint of the first; the shares are unequal."""
    policy, alone, spread = saved_policy(tmp_path), tmp_path / "alone", tmp_path / "spread"
    changes = {"run__questions_per_step": 5, "run__staleness": 1}
    changes |= {"objective__importance_weight_cap": 2.0}
    outcome = call(train_command(alone, policy, **changes), alone)
    assert outcome.code == 0, outcome
    command = train_command(spread, policy, **changes)
    processes = start_all(command)
    wait_for(spread / "checkpoints" / "1", processes[0])
    for process in processes:
        process.kill()
        process.communicate(timeout=60)
    assert len(metric_rows(spread)) == 2  # with the evaluation before training
    processes = start_all(command)
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [row["staleness"] for row in metric_rows(spread)[1:]] == [0, 1, 1]
    assert_equal_runs(alone, spread)


@pytest.mark.optimized
@pytest.mark.slow
def test_a_stopped_and_killed_run_with_stale_rollouts_ends_bit_identical(tmp_path: pathlib.Path):
    """SIGTERM saves the step, which SIGKILL does not; a second process is refused."""
    # Without the signal only the last step would be saved.
    changes = {"run__staleness": 1, "objective__importance_weight_cap": 2.0}
    changes |= {"run__save_every": 100, "run__steps": 6}
    policy, full, broken = saved_policy(tmp_path), tmp_path / "full", tmp_path / "broken"
    assert call(train_command(full, policy, **changes), full).code == 0
    command = train_command(broken, policy, **changes)
    program = [sys.executable, "-m", "jax_ragrl.cli.main", *command]

    process = subprocess.Popen(program, cwd=REPO, stderr=subprocess.PIPE, text=True)
    wait_for(broken / "metrics.jsonl", process)
    process.send_signal(signal.SIGSTOP)  # so that it does not end before the second one starts
    second = subprocess.run(program, cwd=REPO, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert f"in use by process {process.pid}" in second.stderr.splitlines()[-1]
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 143, errors
    last = errors.strip().splitlines()[-1]
    (saved,) = (int(x.name) for x in (broken / "checkpoints").iterdir())
    assert last.startswith(f"ragrl: stopped after step {saved}:") and 1 <= saved < 6

    process = subprocess.Popen(program, cwd=REPO, stderr=subprocess.DEVNULL)
    while len(list(read_rows(broken / "metrics.jsonl"))) < saved + 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert [x.name for x in (broken / "checkpoints").iterdir()] == [f"{saved}"]

    assert call(command, broken).code == 0
    assert digest(broken) == digest(full)
    rows = list(read_rows(broken / "metrics.jsonl"))
    assert [row["step"] for row in rows] == [*range(7)]
    assert [row["staleness"] for row in rows[1:]] == [0, *[1] * 5] and rows[-1]["grad_norm"] > 0
