"""Two updates with a save and a restore between them; as a program, one process of several.

`python -m tests.train.processes FOLDER ADDRESS COUNT NUMBER` joins the others at the address, takes
the updates on a mesh over the devices of all, and writes what it fetched to FOLDER/NUMBER.npz.
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
from jax_ragrl.learner.packing import Turn, grouped
from jax_ragrl.learner.state import Models, Trainer
from jax_ragrl.learner.update import update
from jax_ragrl.runtime.sharding import fetch, make_mesh
from tests.learner.bigram import DEEP, LAYOUT, STEERED, drawn, prepared


def turns() -> list[Turn]:
    """Siblings of two prompts."""
    draw = np.random.default_rng(3)
    prompts = [tuple(draw.integers(0, 12, 4).tolist()) for _ in range(2)]
    ids = [tuple(draw.integers(0, 12, 3 + k % 3).tolist()) for k in range(6)]
    return [Turn(k, "planner", prompts[k % 2], ids[k]) for k in range(6)]


def fresh(mesh: Mesh | None) -> tuple[Trainer, Models]:
    return prepared(STEERED, Optimizer(0.1), drawn(DEEP, mesh=mesh))


def twice(mesh: Mesh | None, workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """Parameters, optimizer state and metrics after an update, a resumed run's, and another one."""
    trainer, models = fresh(mesh)
    groups, numbers = grouped(turns(), LAYOUT), np.linspace(-1, 1, 6, dtype=np.float32)
    models, _ = update(trainer, models, groups, numbers, {}, random.Random(0))
    checkpoints = Checkpoints(workdir)
    checkpoints.save(1, models, {})
    restored, _ = checkpoints.restore(1, fresh(mesh)[1])
    checkpoints.close()
    models, metrics = update(trainer, restored, groups, numbers, {}, random.Random(0))
    return by_path(fetch(models)) | {name: np.float32(x) for name, x in metrics.items()}


def main(folder: str, address: str, count: str, number: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(count), int(number))
    mesh = make_mesh((int(count), -1, 1))
    assert mesh.devices.flat[0].process_index != mesh.devices.flat[-1].process_index
    np.savez(pathlib.Path(folder) / f"{number}.npz", **twice(mesh, pathlib.Path(folder) / "run"))


if __name__ == "__main__":
    main(*sys.argv[1:])
