"""A small run of C-3PO, its commands, and the digest of its results."""

import contextlib
import dataclasses
import hashlib
import io
import json
import pathlib
import subprocess
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jax_ragrl.cli.main import main
from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints
from jax_ragrl.run.lock import unlock_folder
from jax_ragrl.runtime.jsonl import read_rows

CONFIG = pathlib.Path(__file__).parents[2] / "configs" / "tiny" / "c3po.py"
# The smallest run, with `tiny.saved_policy`, that still evaluates, saves trees, and writes
# checkpoints between its steps. Tests that start one share its shapes, and so its programs.
SMALL: Mapping[str, Any] = {
    # The frozen model knows every fact: some strategies are right, and the gradient is not zero.
    "data.world.size": 40,
    "data.world.famous_fraction": 1.0,
    "index.kind": "exact",
    "run.steps": 3,
    "run.questions_per_step": 2,
    "run.save_every": 1,
    "run.eval_every": 2,
    "run.dev_questions": 2,
    "run.save_trees_every": 1,
    "optimizer.minibatches": 1,
    "shapes.prompt_lengths": (256,),
    "shapes.batch_sizes": (16,),
    "shapes.max_new_tokens": 40,
    "packing.row_lengths": (256,),
    "packing.tokens_per_device": 2048,
}
# Starts of the names of metrics that no seed determines: times, and what depends on the servers
# and on earlier attempts at the step.
UNSEEDED = ("time/", "compile/", "tokens_per_sec", "mfu", "server_", "llm_cache_hits")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a command ended: its exit code and all of its output."""

    code: int
    output: str

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.output

    def messages(self) -> list[str]:
        """Returns the lines that `ragrl` addresses to its user."""
        return [line for line in self.output.splitlines() if line.startswith("ragrl: ")]


def train_command(workdir: pathlib.Path, policy: pathlib.Path, **changes: Any) -> list[str]:
    """Returns the command; keys of the config are written with `__` for a dot."""
    values = {**SMALL, "policy": policy}
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    keys = [f"--config.{key}={value}" for key, value in values.items()]
    return ["train", f"--config={CONFIG}", *keys, f"--workdir={workdir}"]


def call(command: Sequence[str], workdir: pathlib.Path) -> Outcome:
    """Runs a command of `ragrl` in this process, which starts and compiles only once.

    Args:
      command: the arguments of `ragrl`.
      workdir: the folder of its run, whose lock is released afterwards.
    """
    output = io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(output),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("always", UserWarning)  # once per call, not once per process
        try:
            code = main(command)
        except BaseException:  # the interpreter would print it and end with 1
            traceback.print_exc()
            code = 1
    unlock_folder(workdir)
    return Outcome(code, output.getvalue())


def wait_for(file: pathlib.Path, process: subprocess.Popen) -> None:
    """Waits until a running process has made a file."""
    deadline = time.monotonic() + 900
    while not file.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def digest(workdir: pathlib.Path) -> str:
    """Returns a hash of all arrays of the newest checkpoint, and of the metrics and trees.

    Arrays and rows are hashed bit by bit, without the metrics of `UNSEEDED`. A run whose newest
    checkpoint cannot be read has no hash, and equals no other run.
    """
    state = hashlib.sha256()
    try:
        arrays = newest_arrays(workdir)
    except UserError as error:
        return f"unreadable: {error}"
    for name, x in sorted(arrays.items()):
        state.update(f"{name} {x.dtype} {x.shape}".encode() + x.tobytes())
    for file in ("metrics.jsonl", "trees.jsonl"):
        for row in read_rows(workdir / file):
            state.update(json.dumps(_seeded(row), sort_keys=True).encode())
    return state.hexdigest()[:16]


def _seeded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in row.items() if not name.startswith(UNSEEDED)}


def newest_arrays(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of the newest checkpoint by their paths; their checksums are checked."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with contextlib.closing(Checkpoints(workdir)) as checkpoints:
        newest = checkpoints.latest()
        assert newest is not None, workdir
        meta = checkpoints.meta(newest)
        like = {
            path: jax.ShapeDtypeStruct(shape, meta["checksums"][path][0], sharding=here)
            for path, shape in meta["shapes"].items()
        }
        return jax.device_get(checkpoints.restore(newest, like)[0])
