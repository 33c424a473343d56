"""The guard in the training loop: it reads each row of metrics and acts on the policies."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import Checkpoints, abstract
from jax_ragrl.learner.policies import Policies, with_rate
from jax_ragrl.learner.state import Policy, copy_arrays
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.run.config import Job
from jax_ragrl.run.indicators import ROLL_BACK, SKIP, STOP, History, Incident, may_save
from jax_ragrl.training.incidents import write_incidents


class Warden:
    """Watches the indicators of a run and acts on incidents; see `run.indicators`.

    Its state is a function of the rows of `metrics.jsonl`, so that a resumed run acts as a whole
    one does.
    """

    def __init__(
        self,
        job: Job,
        workdir: pathlib.Path,
        checkpoints: Checkpoints,
        updates: Mapping[str, int],
        rows: Iterable[Mapping[str, Any]] = (),
    ):
        """Begins to watch a run.

        Args:
          job: the run's config.
          workdir: the folder of the run.
          checkpoints: the checkpoints that a roll back restores.
          updates: by policy, the number of its updates in the whole run.
          rows: the rows of the steps that are finished.
        """
        self._job, self._workdir, self._checkpoints = job, workdir, checkpoints
        self._updates, self._history = updates, History()
        self._incidents = tuple[Incident, ...]()
        self.has_rolled_back = False  # at the newest step
        for row in rows:
            self._observe(row)

    def _observe(self, row: Mapping[str, Any]) -> None:
        # A new phase trains other roles, whose metrics have another level.
        if self._job.schedule.begins_phase(row["step"] - 1):
            self._history = self._history._replace(trends={})
        self._history, self._incidents = self._job.guard.observe(self._history, row)

    @property
    def may_save(self) -> bool:
        """Whether the step may become a checkpoint."""
        return may_save(self._job.guard.limits, self._history)

    def at_rate(self, policies: Policies, step: int) -> Policies:
        """Returns the policies with the lowered learning rate, if an incident has lowered it.

        Args:
          policies: the policies.
          step: the step, from 0.
        """
        job, factor = self._job, self._history.rate_factor
        if factor == 1.0:
            return policies
        phase = job.schedule.phase(step)
        peak = (phase.policy_lr if phase else 0.0) or job.optimizer.policy_lr
        # The transformation is not part of a checkpoint, so it is set at every step.
        return with_rate(policies, peak * factor, job.optimizer, self._updates)

    def spare(self, policies: Policies) -> Policies:
        """Returns copies of the policies before an update, if it may be skipped; empty otherwise.

        They need as much device memory again as the trained parameters and their optimizer.
        """
        limits = self._job.guard.limits.values()
        if not any(limit.action == SKIP for limit in limits):
            return {}
        return {
            name: policy.with_state(**copy_arrays(_trained(policy)))
            for name, policy in policies.items()
        }

    def act(
        self, policies: Policies, spare: Policies, row: Mapping[str, Any], forest: Forest
    ) -> Policies:
        """Observes a step, and applies what its incidents demand, except `stop`.

        Args:
          policies: the policies after the update of the step.
          spare: the policies before it, see `spare`.
          row: the row of the step, before its evaluation.
          forest: the rollouts of the step.

        Returns:
          The policies for the next step.
        """
        self._observe(row)
        self.has_rolled_back = False
        if not self._incidents:
            return policies
        write_incidents(self._workdir, self._incidents, row, forest)
        for incident in self._incidents:
            warnings.warn(incident.message, stacklevel=2)
        actions = {incident.action for incident in self._incidents}
        # The strongest action includes the weaker ones: older policies had no part in the update.
        if ROLL_BACK in actions and STOP not in actions:
            policies, self.has_rolled_back = self._rolled_back(policies), True
        elif SKIP in actions:
            policies = spare
        return policies

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the guard at the newest step; empty without an incident so far."""
        factor = self._history.rate_factor
        values = {f"guard/incident/{x.indicator}": x.number for x in self._incidents}
        return values | ({"guard/rate_factor": factor} if factor < 1 else {})

    def _rolled_back(self, policies: Policies) -> Policies:
        step = self._checkpoints.wait()
        if step is None:
            raise UserError(f"{self._incidents[0].message}, without a checkpoint. {self._advice()}")
        like = {name: abstract(_trained(policy)) for name, policy in policies.items()}
        # Device memory holds one copy of the trained state. The reference stays: its arrays may
        # belong to a frozen language model too, and a phase may have begun since.
        for array in jax.tree.leaves([_trained(policy) for policy in policies.values()]):
            array.delete()
        states = self._checkpoints.restore_part(step, like)
        warnings.warn(f"the policies of step {step} are restored", stacklevel=3)
        return {name: policy.with_state(**states[name]) for name, policy in policies.items()}

    def check_stop(self) -> None:
        """Ends the run if an incident of the step demands it.

        Raises:
          UserError: an indicator with the action `stop` has an incident, one with `skip` has
            skipped too many updates, or one with `roll_back` has rolled back too often.
        """
        # After the log has the step, so that its metrics explain the end.
        for incident in self._incidents:
            if incident.action == STOP:
                raise UserError(f"{incident.message}. {self._advice()}")

    def _advice(self) -> str:
        return (
            f"The batch is in {self._workdir}/incidents. Branch the run with another setting, for "
            f"example: ragrl train --from {self._workdir}@best --workdir=NEW "
            f"--config.optimizer.policy_lr={self._job.optimizer.policy_lr / 2:g}"
        )


def _trained(policy: Policy) -> dict[str, Any]:
    """Returns the parameters and optimizer states, which an update donates."""
    return {"policy": policy.state.policy, "critic": policy.state.critic}
