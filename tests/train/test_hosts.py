"""`ragrl train` on several hosts is the run of one."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from jax_ragrl.models.hf import save_decoder
from tests.flags import flags
from tests.learner.learned_rows import assert_learned_alike, learned
from tests.tiny import policy, tokenizer

REPO = pathlib.Path(__file__).parents[2]
CONFIG = REPO / "configs" / "tiny" / "c3po.py"
SMALL = {
    # The frozen model knows all that is asked: some strategies are right, and there is a gradient.
    "data.world.size": 40,
    "data.world.famous": 1.0,
    "index.kind": "exact",
    "run.steps": 2,
    "run.questions": 5,
    "run.save_every": 1,
    "run.eval_every": 2,
    "run.dev_questions": 3,
    "optimizer.minibatches": 1,
    "shapes.lengths": (256,),
    "shapes.batches": (16,),
    "shapes.steps": 40,
    "layout.lengths": (256,),
    "layout.tokens": 2048,
}


def start(
    workdir: pathlib.Path, folder: pathlib.Path, mesh: str, devices: int, **environ: str
) -> subprocess.Popen:
    """One process of `ragrl train`, with so many devices of its own."""
    given = {**SMALL, "policy": folder, "mesh": mesh}
    overrides = [f"--config.{key}={value}" for key, value in given.items()]
    ragrl = [sys.executable, "-m", "jax_ragrl.cli.main"]
    command = [*ragrl, "train", f"--config={CONFIG}", *overrides]
    environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags(devices)}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(
        [*command, f"--workdir={workdir}"], cwd=REPO, env=os.environ | environ, **out
    )


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def together(count: int) -> list[dict[str, str]]:
    """What the processes of one run are told."""
    address = free_address()
    return [
        {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(i),
            # What a set of strings is iterated in must not tell the processes apart.
            "PYTHONHASHSEED": str(i + 1),
        }
        for i in range(count)
    ]


def final_arrays(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    state = ocp.args.StandardRestore(fallback_sharding=here)
    with ocp.CheckpointManager((workdir / "checkpoints").absolute()) as manager:
        assert manager.latest_step() == 2
        restored = manager.restore(2, args=ocp.args.Composite(state=state))
    return {name: np.asarray(x) for name, x in restored["state"].items()}


@pytest.mark.slow
def test_two_hosts_ask_write_and_learn_what_one_does_and_the_first_writes_its_files(
    tmp_path: pathlib.Path,
):
    """Two devices each, over which weights are split; the gradient is not nothing."""
    tokenizer().save(tmp_path / "tokenizer")
    folder = save_decoder(nnx.merge(*policy()), tmp_path / "policy", tmp_path / "tokenizer")
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    one = start(alone, folder, "()", 1)
    said = one.communicate(timeout=600)[0]
    assert one.returncode == 0, said
    processes = [start(spread, folder, "(1, -1, 1)", 2, **told) for told in together(2)]
    said = [process.communicate(timeout=600)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    for i, text in enumerate(said):
        assert f"process {i} of 2, 2 devices here, 4 in all" in text
        assert ("step 1" in text) == (i == 0)
    files = ({path.name for path in folder.iterdir()} for folder in (alone, spread))
    assert next(files) == next(files)
    assert len(list((spread / "tensorboard").iterdir())) == 1
    assert [row["step"] for row in learned(spread)] == [1, 2]
    assert learned(alone)[1]["kl/mean"] > 1e-3
    assert_learned_alike(alone, spread)
    expected, found = final_arrays(alone), final_arrays(spread)
    assert set(found) == set(expected) and len(found) > 10
    for name, x in expected.items():
        np.testing.assert_allclose(found[name], x, rtol=1e-3, atol=1e-5, err_msg=name)
