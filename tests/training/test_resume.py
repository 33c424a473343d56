"""A run that is stopped, killed and resumed ends with bitwise equal parameters."""

import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jax_ragrl.runtime.jsonl import read_rows
from tests.chaos.runs import call, digest, train_command, wait_for
from tests.tiny import saved_policy

REPO = pathlib.Path(__file__).parents[2]


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
