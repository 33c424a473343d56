"""The policies with the best score on the dev questions of a run, in `best/<step>`."""

from __future__ import annotations

import contextlib
import math
import pathlib

from jax_ragrl.learner.checkpoint import BEST, Checkpoints
from jax_ragrl.learner.policies import Policies
from jax_ragrl.runtime.multihost import on_process_zero


def keep_best(workdir: pathlib.Path, step: int, score: float, policies: Policies) -> None:
    """Saves the parameters of the policies if their score is the best one of the run so far.

    Optimizer states, critics and references are not kept: a run that starts from these policies
    (`start_from`) is a new run. `score` is the mean on dev questions after `step` updates; nan is
    never the best.
    """
    with contextlib.closing(Checkpoints(workdir, BEST, keep=1)) as checkpoints:
        before = checkpoints.latest()
        best = -math.inf if before is None else checkpoints.meta(before)["score"]
        # A resumed run repeats evaluations, whose scores are equal and not above the best one.
        if score > best:
            states = {name: policy.state.policy for name, policy in policies.items()}
            params = {name: {"policy": {"params": x.params}} for name, x in states.items()}
            # A run that resumed from an older checkpoint has lost the updates of a later best one.
            # A run that ends before the save repeats this evaluation, and saves then.
            checkpoints.delete_from(step)
            checkpoints.save(step, params, {"score": score})


def forget_best(workdir: pathlib.Path) -> None:
    """Deletes the best policies in the folder of a run that begins with its first step.

    They are left by an attempt that ended before its first checkpoint; until then the config may
    change, and another config's score could never be beaten.
    """
    # Orbax would create the folder.
    if on_process_zero((workdir / BEST).is_dir):
        with contextlib.closing(Checkpoints(workdir, BEST, keep=1)) as checkpoints:
            checkpoints.delete_from(0)
