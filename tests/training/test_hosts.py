"""`ragrl train` on several hosts equals the run on one host."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.flags import flags
from tests.learner.metric_rows import assert_equal_metrics, metric_rows
from tests.tiny import saved_policy
from tests.training.test_resume import final_arrays, wait_for

REPO = pathlib.Path(__file__).parents[2]
CONFIG = REPO / "configs" / "tiny" / "c3po.py"
SMALL = {
    # The frozen model knows every fact: some strategies are right, and the gradient is not zero.
    "data.world.size": 40,
    "data.world.famous_fraction": 1.0,
    "index.kind": "exact",
    "run.steps": 2,
    "run.save_every": 1,
    "run.eval_every": 2,
    "run.dev_questions": 3,
    "optimizer.minibatches": 1,
    "shapes.prompt_lengths": (256,),
    "shapes.batch_sizes": (16,),
    "shapes.max_new_tokens": 40,
    "packing.row_lengths": (256,),
    "packing.tokens_per_device": 2048,
}


def start(
    workdir: pathlib.Path,
    folder: pathlib.Path,
    mesh: str,
    devices: int,
    *,
    staleness: int = 0,
    questions: int = 5,
    **environ: str,
) -> subprocess.Popen:
    """Starts one process of `ragrl train` with some devices of its own."""
    settings = {**SMALL, "policy": folder, "mesh": mesh, "run.staleness": staleness}
    settings |= {"run.questions_per_step": questions}
    settings |= {"objective.importance_weight_cap": 2.0 * staleness}
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    ragrl = [sys.executable, "-m", "jax_ragrl.cli.main"]
    command = [*ragrl, "train", f"--config={CONFIG}", *overrides]
    environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(devices)}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [*command, f"--workdir={workdir}"], cwd=REPO, env=os.environ | environ, **out
    )


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


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Returns the folder of an initial policy."""
    return saved_policy(tmp_path)


def assert_equal_runs(one: pathlib.Path, other: pathlib.Path) -> None:
    assert_equal_metrics(one, other)
    expected, actual = final_arrays(one, 2), final_arrays(other, 2)
    assert set(actual) == set(expected) and len(actual) > 10
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("questions", [5, 1])
def test_two_hosts_train_like_one_and_the_first_writes_files(
    tmp_path: pathlib.Path, folder: pathlib.Path, questions: int
):
    """Weights are split over two devices per host; the KL shows that the gradient is not zero.

    They share the tree of a single question.
    """
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    one = start(alone, folder, "()", 1, questions=questions)
    output = one.communicate(timeout=600)[0]
    assert one.returncode == 0, output
    processes = [
        start(spread, folder, "(1, -1, 1)", 2, questions=questions, **env)
        for env in environments(2)
    ]
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    for i, text in enumerate(outputs):
        assert f"process {i} of 2, 2 devices here, 4 in all" in text
        assert ("step 1" in text) == (i == 0)
    files = ({path.name for path in folder.iterdir()} for folder in (alone, spread))
    assert next(files) == next(files)
    assert len(list((spread / "tensorboard").iterdir())) == 1
    assert [row["step"] for row in metric_rows(spread)] == [0, 1, 2]
    assert metric_rows(alone)[2]["kl/mean"] > 1e-3
    assert_equal_runs(alone, spread)


@pytest.mark.slow
def test_two_hosts_that_are_killed_roll_out_during_updates_like_one(
    tmp_path: pathlib.Path, folder: pathlib.Path
):
    """The forest of the second step is in the checkpoint of the first."""
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    one = start(alone, folder, "()", 1, staleness=1)
    output = one.communicate(timeout=600)[0]
    assert one.returncode == 0, output

    def start_all() -> list[subprocess.Popen]:
        mesh = "(1, -1, 1)"
        return [start(spread, folder, mesh, 2, staleness=1, **env) for env in environments(2)]

    processes = start_all()
    wait_for(spread / "checkpoints" / "1", processes[0])
    for process in processes:
        process.kill()
        process.communicate(timeout=60)
    assert len(metric_rows(spread)) == 2  # with the evaluation before training
    processes = start_all()
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert [row["staleness"] for row in metric_rows(spread)[1:]] == [0, 1]
    assert_equal_runs(alone, spread)
