"""A run that is killed and resumed ends with bitwise equal parameters."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.tiny import saved_policy

REPO = pathlib.Path(__file__).parents[2]


def command(workdir: pathlib.Path, folder: pathlib.Path, staleness: int = 0) -> list[str]:
    small = {
        "run.staleness": staleness,
        "objective.importance_weight_cap": 2.0 * staleness,
        "policy": folder,
        "data.world.size": 40,
        "run.steps": 4,
        "run.questions_per_step": 2,
        "run.save_every": 1,
        "run.eval_every": 100,
        "run.dev_questions": 2,
        "packing.tokens_per_device": 1024,
    }
    overrides = [f"--config.{key}={value}" for key, value in small.items()]
    config = f"--config={REPO / 'configs' / 'tiny' / 'c3po.py'}"
    ragrl = [sys.executable, "-m", "jax_ragrl.cli.main", "train"]
    return [*ragrl, config, f"--workdir={workdir}", *overrides]


def final_arrays(workdir: pathlib.Path, step: int = 4) -> dict[str, np.ndarray]:
    """Returns the arrays of the newest checkpoint, which may be from a mesh."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = ocp.args.StandardRestore(fallback_sharding=here)
    with ocp.CheckpointManager((workdir / "checkpoints").absolute()) as manager:
        assert manager.latest_step() == step
        restored = manager.restore(step, args=ocp.args.Composite(state=state))
    return {name: np.asarray(x) for name, x in restored["state"].items()}


def wait_for(file: pathlib.Path, process: subprocess.Popen) -> None:
    """Waits until a running process has made a file."""
    deadline = time.monotonic() + 300
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def run_until_killed(workdir: pathlib.Path, own_command: list[str], checkpoint: int) -> None:
    """Starts a run and sends SIGKILL shortly after the checkpoint of a step appears."""
    process = subprocess.Popen(own_command, cwd=REPO, stderr=subprocess.DEVNULL)
    wait_for(workdir / "checkpoints" / str(checkpoint), process)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_sigterm_saves_the_step_and_a_second_process_is_refused(tmp_path: pathlib.Path):
    folder = saved_policy(tmp_path)
    workdir = tmp_path / "run"
    # Without the signal only the last step would be saved.
    rare = [*command(workdir, folder), "--config.run.save_every=100"]
    process = subprocess.Popen(rare, cwd=REPO, stderr=subprocess.PIPE, text=True)
    wait_for(workdir / "config.json", process)
    second = subprocess.run(rare, cwd=REPO, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert f"in use by process {process.pid}" in second.stderr.splitlines()[-1]
    wait_for(workdir / "metrics.jsonl", process)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 143, errors
    last = errors.strip().splitlines()[-1]
    assert last.startswith("ragrl: stopped after step")
    (saved,) = (int(x.name) for x in (workdir / "checkpoints").iterdir())
    assert f"step {saved}:" in last and 1 <= saved < 4
    subprocess.run(rare, cwd=REPO, check=True)
    assert len(final_arrays(workdir)) > 10


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_killed_and_resumed_run_ends_bit_identical(tmp_path: pathlib.Path, staleness: int):
    folder = saved_policy(tmp_path)
    full, broken = tmp_path / "full", tmp_path / "broken"
    subprocess.run(command(full, folder, staleness), cwd=REPO, check=True)
    for checkpoint in (1, 3):
        run_until_killed(broken, command(broken, folder, staleness), checkpoint)
    subprocess.run(command(broken, folder, staleness), cwd=REPO, check=True)
    one, other = final_arrays(full), final_arrays(broken)
    assert one.keys() == other.keys() and len(one) > 10
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert any("policy" in name for name in one)
    steps = [line.split()[1] for line in (broken / "metrics.jsonl").read_text().splitlines()]
    assert steps == ["0,", "1,", "2,", "3,", "4,"]
