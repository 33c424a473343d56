"""Two updates with a checkpoint in between; as a program, one process of several.

`python -m tests.training.processes FOLDER ADDRESS COUNT NUMBER` joins the other processes at the
address, takes the updates on a mesh over all devices, and writes the results to FOLDER/NUMBER.npz.
"""

from __future__ import annotations

import pathlib
import random
import sys

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ragrl.learner.checkpoint import Checkpoints, by_path
from jax_ragrl.learner.optimizer import Optimizer
from jax_ragrl.learner.packing import Turn, group_turns
from jax_ragrl.learner.state import Policy
from jax_ragrl.learner.update import update
from jax_ragrl.runtime.sharding import make_mesh, to_host
from tests.learner.bigram import DEEP, LAYOUT, STEERED, prepared, random_decoder


def turns() -> list[Turn]:
    """Returns siblings of two prompts, with credit."""
    draw = np.random.default_rng(3)
    prompts = [tuple(draw.integers(0, 12, 4).tolist()) for _ in range(2)]
    ids = [tuple(draw.integers(0, 12, 3 + k % 3).tolist()) for k in range(6)]
    credit = np.linspace(-1, 1, 6, dtype=np.float32).tolist()
    return [Turn(k, "planner", prompts[k % 2], ids[k], credit=credit[k]) for k in range(6)]


def initial_policy(mesh: Mesh | None) -> Policy:
    return prepared(STEERED, Optimizer(0.1), random_decoder(DEEP, mesh=mesh))


def update_twice(mesh: Mesh | None, workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns state and metrics after an update, a restart from a checkpoint and another update."""
    groups = group_turns(turns(), LAYOUT)
    policy, _ = update(initial_policy(mesh), groups, random.Random(0))
    checkpoints = Checkpoints(workdir)
    checkpoints.save(1, policy.state, {})
    restored, _ = checkpoints.restore(1, initial_policy(mesh).state)
    checkpoints.close()
    policy, metrics = update(policy._replace(state=restored), groups, random.Random(0))
    return by_path(to_host(policy.state)) | {name: np.float32(x) for name, x in metrics.items()}


def main(folder: str, address: str, count: str, number: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(count), int(number))
    mesh = make_mesh((int(count), -1, 1))
    assert mesh.devices.flat[0].process_index != mesh.devices.flat[-1].process_index
    np.savez(
        pathlib.Path(folder) / f"{number}.npz", **update_twice(mesh, pathlib.Path(folder) / "run")
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
