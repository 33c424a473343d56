"""The policies with the best score on the dev questions of a run, in `best/<step>`."""

from __future__ import annotations

import math
import pathlib

from jax_ragrl.learner.checkpoint import BEST, Checkpoints
from jax_ragrl.learner.policies import Policies


class BestPolicies:
    """Keeps the parameters of the best policies of a run so far.

    Optimizer states, critics and references are not kept: a run that starts from them
    (`start_from`) is a new run.
    """

    def __init__(self, workdir: pathlib.Path) -> None:
        """Opens the best checkpoint of a run folder, if there is one."""
        self._checkpoints = Checkpoints(workdir, BEST, keep=1)
        step = self._checkpoints.latest()
        self.score = -math.inf if step is None else self._checkpoints.meta(step)["score"]

    def offer(self, step: int, score: float | None, policies: Policies) -> None:
        """Saves the policies if their score is above the best one so far.

        Args:
          step: the number of finished updates.
          score: the mean score on dev questions; None or nan if the step has none.
          policies: the policies after the step.
        """
        if score is None or not score > self.score:  # False for nan
            return
        self.score = score
        params = {
            name: {"policy": {"params": policy.state.policy.params}}
            for name, policy in policies.items()
        }
        self._checkpoints.save(step, params, {"score": score})

    def close(self) -> None:
        """Waits for unfinished writes."""
        self._checkpoints.close()
