"""Several processes of a cluster compute what one does."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.flags import flags
from tests.train.processes import twice

REPO = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_take_the_updates_that_one_device_takes_and_resume(tmp_path: pathlib.Path):
    """Two devices each: batches are split over both, parameters within each; both fetch it all."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    given = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(2)}
    program = [sys.executable, "-m", "tests.train.processes", str(tmp_path), address, "2"]
    running = [subprocess.Popen([*program, str(i)], cwd=REPO, env=given) for i in range(2)]
    expected = twice(None, tmp_path / "alone")
    assert [process.wait(timeout=1200) for process in running] == [0, 0]
    for i in range(2):
        found = np.load(tmp_path / f"{i}.npz")
        assert set(found) == set(expected) and len(found) > 10
        for name, x in expected.items():
            np.testing.assert_allclose(found[name], x, rtol=1e-4, atol=1e-5, err_msg=name)
