"""A run on several hosts that are killed equals an undisturbed one of one process."""

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.chaos.runs import call, newest_arrays, train_command, wait_for
from tests.flags import flags
from tests.runtime.test_multihost import free_address
from tests.tiny import saved_policy
from tests.training.trial import seeded_rows

REPO = pathlib.Path(__file__).parents[2]
MESH = "(1, -1, 1)"
# Both processes compile programs for four devices, which takes longer than they compute.
TWO_DEVICES = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(2), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def start_all(command: list[str]) -> list[subprocess.Popen]:
    program = [sys.executable, "-m", "jax_ragrl.cli.main", *command]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen(program, cwd=REPO, env=os.environ | TWO_DEVICES | own, **out)
        for own in environments(2)
    ]


def environments(count: int) -> list[dict[str, str]]:
    address = free_address()
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


@pytest.mark.optimized
@pytest.mark.slow
def test_two_hosts_that_are_killed_roll_out_during_updates_like_one(tmp_path: pathlib.Path):
    """The forest of the second step is in the checkpoint of the first; the shares are unequal.

    Weights are split over hosts and over the two devices of each; the KL shows that the gradient is
    not zero. The first process alone writes files.
    """
    policy, alone, spread = saved_policy(tmp_path), tmp_path / "alone", tmp_path / "spread"
    changes = {"run__questions_per_step": 5, "run__staleness": 1}
    changes |= {"objective__importance_weight_cap": 2.0}
    outcome = call(train_command(alone, policy, **changes), alone)
    assert outcome.code == 0, outcome
    command = train_command(spread, policy, mesh="(1, -1, 2)", **changes)
    processes = start_all(command)
    wait_for(spread / "checkpoints" / "1", processes[0])
    for process in processes:
        process.send_signal(signal.SIGSTOP)  # so that they do not end before the next call
    another = call(command, spread)
    assert another.code == 2
    assert f"in use by process {processes[0].pid}" in another.messages()[-1]
    for process in processes:
        process.kill()
        process.communicate(timeout=60)
    assert len(seeded_rows(spread)) == 2  # with the evaluation before training
    processes = start_all(command)
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for i, text in enumerate(outputs):
        assert f"process {i} of 2, 2 devices here, 4 in all" in text
        assert ("step 3" in text) == (i == 0)
    files = ({path.name for path in folder.iterdir()} for folder in (alone, spread))
    assert next(files) == next(files)
    assert len(list((spread / "tensorboard").iterdir())) == 2  # of the first process of each start
    rows = seeded_rows(spread)
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and rows[-1]["kl/mean"] > 1e-3
    assert [row["staleness"] for row in rows[1:]] == [0, 1, 1]
    for expected, actual in zip(seeded_rows(alone), rows, strict=True):
        assert expected.keys() == actual.keys()
        for name, x in expected.items():
            np.testing.assert_allclose(actual[name], x, rtol=1e-3, atol=1e-4, err_msg=name)
    expected, actual = newest_arrays(alone), newest_arrays(spread)
    assert set(actual) == set(expected) and len(actual) > 10
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-3, atol=1e-5, err_msg=name)
