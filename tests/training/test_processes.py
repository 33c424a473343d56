"""Several processes compute the same as one."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.flags import flags
from tests.training.processes import update_twice

REPO = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_take_the_updates_of_one_device(tmp_path: pathlib.Path):
    """With two devices each and a restart: batches are split over processes, parameters within."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(2)}
    program = [sys.executable, "-m", "tests.training.processes", str(tmp_path), address, "2"]
    processes = [subprocess.Popen([*program, str(i)], cwd=REPO, env=environment) for i in range(2)]
    expected = update_twice(None, tmp_path / "alone")
    assert [process.wait(timeout=1200) for process in processes] == [0, 0]
    for i in range(2):
        actual = np.load(tmp_path / f"{i}.npz")
        assert set(actual) == set(expected) and len(actual) > 10
        for name, x in expected.items():
            np.testing.assert_allclose(actual[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
