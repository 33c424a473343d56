"""The work folder of a run: it belongs to one config, on all hosts of the run."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from jax_ragrl.config.snapshot import LOCATION_KEYS, check_saved_config, save_config
from jax_ragrl.run.claims import claim_versions, has_results, steps_taken
from jax_ragrl.run.config import Job
from jax_ragrl.run.load import load_job
from jax_ragrl.run.lock import lock_folder
from jax_ragrl.runtime.multihost import all_gather_object, check_shared_folder, on_process_zero


def claim_workdir(
    values: Mapping[str, Any], workdir: pathlib.Path, place: str = "--workdir"
) -> Job:
    """Returns the job of a config, which becomes the only config of `workdir`.

    `place` is the option that names it. `UserError` if the config is invalid, or `workdir` is in
    use or holds results of another config or version of JAX.
    """
    job, file = load_job(values), workdir / "config.json"
    # 1. All hosts must see one folder, or each would save a config for itself.
    check_shared_folder(workdir)
    on_process_zero(lambda: lock_folder(workdir, place))
    # A learning rate that does not depend on the length of a run permits extending the run.
    is_longer = on_process_zero(lambda: steps_taken(workdir)) <= job.run.steps
    is_free = job.optimizer.steady and is_longer
    free = (*LOCATION_KEYS, "config.run.steps") if is_free else LOCATION_KEYS
    # 2. One process writes, because several writers would replace each other's file.
    on_process_zero(
        lambda: save_config(file, values, free=free, renew=not has_results(workdir), place=place)
    )
    # 3. Every host compares its config with that file: hosts may have been started differently.
    all_gather_object(lambda: check_saved_config(file, values, free, place))
    claim_versions(workdir, is_free=job.run.other_versions)
    return job
