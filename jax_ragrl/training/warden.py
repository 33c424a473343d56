"""The guard in the training loop: it reads each row of metrics and acts on the policies."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jax_ragrl.errors import UserError
from jax_ragrl.learner.checkpoint import BEST
from jax_ragrl.learner.policies import Policies, with_rate
from jax_ragrl.learner.state import Policy
from jax_ragrl.rollout.tree import Forest, Record
from jax_ragrl.run.checkpoint_name import has_checkpoints
from jax_ragrl.run.config import Job
from jax_ragrl.run.indicators import STOP, UNDO, History, Incident, may_save
from jax_ragrl.runtime.host_copies import copy_to_devices, copy_to_host
from jax_ragrl.runtime.jsonl import write_json
from jax_ragrl.runtime.multihost import is_process_zero, on_process_zero


class Warden:
    """Watches the indicators of a run and acts on incidents; see `run.indicators`.

    Its state is a function of the rows of `metrics.jsonl`, so that a resumed run acts as a whole
    one does.
    """

    def __init__(
        self,
        job: Job,
        workdir: pathlib.Path,
        updates: Mapping[str, int],
        rows: Iterable[Mapping[str, Any]] = (),
    ):
        """Begins after the `rows` of finished steps; `updates` are those of the run, by policy."""
        self._job, self._workdir = job, workdir
        self._updates, self._history = updates, History()
        self._incidents = tuple[Incident, ...]()
        self._forest: Forest | None = None  # the rollouts of the step, for its incident file
        self.has_undone = False  # the update of the newest step
        for row in rows:
            self._begin(row["step"])
            for part in _parts(row):
                self._observe(part)

    def _begin(self, step: int) -> None:
        self._incidents = ()
        self.has_undone = False
        # A new phase trains other roles, whose metrics have another level.
        if self._job.schedule.begins_phase(step - 1):
            self._history = self._history._replace(trends={})

    def _observe(self, row: Mapping[str, Any]) -> tuple[Incident, ...]:
        self._history, incidents = self._job.guard.observe(self._history, row)
        self._incidents = (*self._incidents, *incidents)
        return incidents

    @property
    def may_save(self) -> bool:
        return may_save(self._job.guard.limits, self._history)

    def at_rate(self, policies: Policies, step: int) -> Policies:
        """Returns the policies with the rate as incidents have lowered it; `step` is from 0."""
        job, factor = self._job, self._history.rate_factor
        if factor == 1.0:
            return policies
        phase = job.schedule.phase(step)
        peak = (phase.policy_lr if phase else 0.0) or job.optimizer.policy_lr
        # The transformation is not part of a checkpoint, so it is set at every step.
        return with_rate(policies, peak * factor, job.optimizer, self._updates)

    def spare(self, policies: Policies) -> Policies:
        """Returns copies of the policies in host memory before an update that may be undone."""
        limits = self._job.guard.limits.values()
        if not any(limit.action == UNDO for limit in limits):
            return {}
        return {
            name: policy.with_state(**copy_to_host(_trained(policy)))
            for name, policy in policies.items()
        }

    def act(
        self, policies: Policies, spare: Policies, row: Mapping[str, Any], forest: Forest
    ) -> Policies:
        """Observes a step, and applies what its incidents demand, except `stop`.

        Args:
          spare: the policies before it in host memory, see `spare`.
          row: of the step, before its evaluation.
        """
        self._begin(row["step"])
        self._forest = forest
        actions = self._report(self._observe(row), row)
        if UNDO in actions:
            policies = {
                name: old.with_state(**copy_to_devices(_trained(old), _trained(policies[name])))
                for name, old in spare.items()
            }
            self.has_undone = True
        return policies

    def judge(self, row: Mapping[str, Any]) -> None:
        """Observes the evaluation of a step after `act`; `row` has both."""
        self._report(self._observe(_parts(row)[1]), row)

    def _report(self, incidents: Sequence[Incident], row: Mapping[str, Any]) -> set[str]:
        """Warns of incidents, writes their file, and returns their actions."""
        if incidents and self._forest is not None:
            write_incidents(self._workdir, self._incidents, row, self._forest)
        for incident in incidents:
            warnings.warn(incident.message, stacklevel=3)
        return {incident.action for incident in incidents}

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the guard at the newest step; empty without an incident so far."""
        factor = self._history.rate_factor
        values = {f"guard/incident/{x.indicator}": x.number for x in self._incidents}
        return values | ({"guard/rate_factor": factor} if factor < 1 else {})

    def check_stop(self) -> None:
        """Raises `UserError` if an incident of the step demands the end of the run."""
        # After the log has the step, so that its metrics explain the end.
        for incident in self._incidents:
            if incident.action == STOP:
                raise UserError(f"{incident.message}. {self._advice()}")

    def _advice(self) -> str:
        # A rate that undone updates have lowered was still too high.
        rate = self._job.optimizer.policy_lr * min(0.5, self._history.rate_factor)
        folder = self._workdir
        has_best = on_process_zero((folder / BEST).is_dir)
        has_newest = has_checkpoints(folder)  # a collective of its own
        newest = f"--from {folder}" if has_newest else "--config=CONFIG"
        start = f"--from {folder}@best" if has_best else newest
        return (
            f"The batch is in {folder}/incidents. Branch the run with another setting, such as: "
            f"ragrl train {start} --workdir=NEW "
            f"--config.optimizer.policy_lr={rate:g}"
        )


def _parts(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a row as its step observes it: before its evaluation, and the evaluation."""
    late = {key: value for key, value in row.items() if key.startswith("eval/")}
    early = {key: value for key, value in row.items() if key not in late}
    return early, late | {"step": row["step"]}


def _trained(policy: Policy) -> dict[str, Any]:
    return {"policy": policy.state.policy, "critic": policy.state.critic}


def write_incidents(
    workdir: pathlib.Path, incidents: Sequence[Incident], row: Mapping[str, Any], forest: Forest
) -> None:
    """Writes `incidents/step-<step>.json`: the incidents of a step, its metrics and its batch."""
    if not is_process_zero():
        return
    # One file per step: an unattended run may have many incidents, of which the first one matters.
    file = workdir / "incidents" / f"step-{incidents[0].step}.json"
    file.parent.mkdir(exist_ok=True)
    batch = list(questions_of(forest))
    value = {"incidents": [x._asdict() for x in incidents], "metrics": row, "questions": batch}
    write_json(file, value)


def questions_of(forest: Forest) -> Iterator[dict[str, Any]]:
    failures = dict(zip(forest.failed_questions, forest.failures, strict=True))

    def action(record: Record) -> dict[str, Any]:
        assert record.action is not None, "all records but leaves have one"
        logps = record.action.logps
        return {
            "role": record.role,
            "path": list(record.path),
            "text": record.action.text,
            "error": record.parse_error,
            "multiplicity": record.multiplicity,
            "logp_per_token": float(np.mean(logps)) if logps else None,
        }

    for number, question in enumerate(forest.questions):
        nodes = np.flatnonzero(forest.question_N == number).tolist()
        leaves = [n for n in nodes if forest.leaf_N[n]]
        yield {
            "id": question.id,
            "question": question.text,
            "answers": list(question.answers),
            "failure": failures.get(number, ""),
            "rollouts": [
                {
                    "reward": float(forest.reward_N[n]),
                    "answer": forest.records[n].answer,
                    "finish_reason": forest.records[n].finish_reason,
                    "calls": len(forest.records[n].calls),
                }
                for n in leaves
            ],
            "actions": [action(forest.records[n]) for n in nodes if n not in leaves],
        }
