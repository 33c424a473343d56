"""The rollouts of a run, made before the update of their step or during the update before it.

    staleness 0    roll out 1 | update 1 | roll out 2 | update 2 | roll out 3 | update 3
    staleness 1    roll out 1 | update 1 | update 2 | update 3
                              | roll out 2 | roll out 3 | roll out 4          (one worker thread)

With staleness 1 the policies that sample are one update older than the policies that are trained on
the samples; importance weights correct for that. A checkpoint holds the forest in flight, so that a
resumed run trains on the same samples.

On several processes the worker thread of each makes the rollouts of its shard, on its own devices.
Only the main threads exchange messages, all in one order. So they ask the questions that replace
dead ones (`Method.refill`), after the update, but by the same policies as the first ones.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from jax_ragrl.corpus.questions import QuestionStream
from jax_ragrl.learner.policies import Policies
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.rollout.tree import Forest
from jax_ragrl.rollout.waiting import CAUSES, DEVICE, WaitingTimes
from jax_ragrl.runtime import records
from jax_ragrl.training.step import (
    Method,
    collect_shard,
    dead_questions,
    gather,
    join,
    turns_to_train,
)
from jax_ragrl.types import Question


class Rollout(NamedTuple):
    """The rollouts of a step with their rewards.

    `staleness` is the number of updates since the policies sampled it, `seconds` its duration by
    cause (see `rollout.waiting`), and `early_wait` the seconds that the run waited for it before
    the step.
    """

    forest: Forest
    seconds: Mapping[str, float]
    staleness: int = 0
    early_wait: float = 0.0

    def metrics(self, laps: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics, from seconds of the step; in them `time/rollout_s` is the credit."""
        waits = {f"time/wait_{cause}_s": x for cause, x in self.seconds.items()}
        wait_s = laps["time/wait_rollout_s"] + self.early_wait
        times = {
            "time/wait_rollout_s": wait_s,
            "time/step_s": wait_s + laps["time/rollout_s"] + laps["time/train_s"],
            "time/rollout_s": laps["time/rollout_s"] + sum(self.seconds.values()),
        }
        return {"staleness": float(self.staleness), **waits, **laps, **times}


class InFlight(NamedTuple):
    """Rollouts that were begun before their `step`, from 0, and may be stopped by `waiting`.

    `data` is the state of the questions before the step drew its own, and `environment` that of the
    rollouts. The `staleness` is 0 if the update since was undone.
    `is_whole`: `rollout` has the rollouts of all processes.
    """

    step: int
    data: Any
    questions: Sequence[Question]
    environment: Environment | None
    rollout: Future[Rollout]
    waiting: WaitingTimes
    staleness: int = 1
    is_whole: bool = False


@dataclasses.dataclass
class Rollouts:
    """Makes the rollouts of the steps of a run, in order.

    `act` returns an environment in which policies act, given whether it outlives the next update.
    `notes_signal`: `data` learns which questions of a step were dead.
    """

    method: Method
    data: QuestionStream
    questions_per_step: int
    steps: int
    staleness: int
    act: Callable[[Policies, bool], Environment]
    notes_signal: bool = False
    _in_flight: InFlight | None = None
    _early_wait: float = 0.0

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "rollout")

    def take(self, policies: Policies, step: int) -> Rollout:
        """Returns the rollouts of a step, from 0, in flight or beginning now (a collective)."""
        rollout = self._take(policies, step)
        if self.notes_signal:
            forest = rollout.forest
            dead = dead_questions(forest, turns_to_train(self.method, forest)[0])
            asked = [i for i in range(len(forest.questions)) if i not in forest.failed_questions]
            self.data.note({forest.questions[i].id: float(i not in dead) for i in asked})
        return rollout

    def _take(self, policies: Policies, step: int) -> Rollout:
        self._finish()
        in_flight, self._in_flight = self._in_flight, None
        early_wait, self._early_wait = self._early_wait, 0.0
        if in_flight is not None:
            rollout = in_flight.rollout.result()
            return rollout._replace(staleness=in_flight.staleness, early_wait=early_wait)
        waiting = WaitingTimes()
        with waiting.call(DEVICE):
            environment = self.act(policies, False)._replace(times=waiting)
        method, questions = self.method, self.data.draw(self.questions_per_step)
        forest = gather(
            method, questions, lambda: collect_shard(method, environment, questions, step)
        )
        forest = self._refill(forest, environment, step)
        return Rollout(forest, waiting.seconds())

    def _refill(self, forest: Forest, environment: Environment, step: int) -> Forest:
        """Adds rollouts of further questions in place of dead ones (a collective)."""
        for number in range(1, self.method.refill + 1):
            dead = dead_questions(forest, turns_to_train(self.method, forest)[0])
            missing = self.questions_per_step - len(forest.questions) + len(dead)
            if not missing:
                break
            more = self.data.draw(missing)
            shard = functools.partial(collect_shard, self.method, environment, more, step, number)
            forest = join(self.method, forest, gather(self.method, more, shard))
        return forest

    def begin(self, policies: Policies, step: int) -> None:
        """Begins the rollouts of a step in the worker thread, if they may be stale.

        `policies` are those before the step before, which an update may then donate.
        """
        # The first rollouts of a phase have its roles and come from the policies that it begins
        # with, which are its references.
        if not self.staleness or step >= self.steps or self.method.schedule.begins_phase(step):
            return
        waiting, state = WaitingTimes(), self.data.get_state()
        with waiting.call(DEVICE):
            environment = self.act(policies, True)._replace(times=waiting)
        questions = self.data.draw(self.questions_per_step)

        def run() -> Rollout:
            forest = collect_shard(self.method, environment, questions, step)
            return Rollout(forest, waiting.seconds())

        rollout = self._pool.submit(run)
        self._in_flight = InFlight(step, state, questions, environment, rollout, waiting)

    def wait(self) -> None:
        """Waits for the rollouts in flight; `take` raises an error of theirs. A collective."""
        if self._in_flight is not None:
            start = time.perf_counter()
            self._finish()
            self._early_wait += time.perf_counter() - start

    def _finish(self) -> None:
        """Waits for the rollouts in flight on all processes and gathers them (a collective)."""
        in_flight = self._in_flight
        if in_flight is None or in_flight.is_whole:
            return
        assert in_flight.environment is not None, "only whole rollouts have none"
        shard, whole = in_flight.rollout, Future[Rollout]()
        try:
            forest = gather(self.method, in_flight.questions, lambda: shard.result().forest)
            first, waiting = shard.result(), WaitingTimes()
            environment = in_flight.environment._replace(times=waiting)
            forest = self._refill(forest, environment, in_flight.step)
            seconds = {cause: x + first.seconds[cause] for cause, x in waiting.seconds().items()}
            whole.set_result(Rollout(forest, seconds))
        except Exception as error:  # any error belongs to the step, which comes later
            whole.set_exception(error)
        self._in_flight = in_flight._replace(rollout=whole, environment=None, is_whole=True)

    def discard(self) -> None:
        """Stops the rollouts in flight; `take` makes them again, with the policies of its step."""
        if self._in_flight is None:
            return
        self._in_flight.waiting.stop()
        wait([self._in_flight.rollout])
        self.data.set_state(self._in_flight.data)
        self._in_flight = None

    def refresh(self) -> None:
        """Notes that the update since the rollouts in flight were begun was undone."""
        if self._in_flight is not None:
            self._in_flight = self._in_flight._replace(staleness=0)

    def state(self, *, is_last: bool = False) -> dict[str, Any]:
        """Returns the entries of a checkpoint from which `restore` continues.

        Waits for the rollouts in flight. If they failed, they are left out: the resumed run makes
        them again. After the last step they are discarded. A collective.
        """
        if is_last:
            self.discard()
        if self._in_flight is None:
            return {"data": self.data.get_state()}
        self.wait()
        entries = {"data": self._in_flight.data}
        rollout = self._in_flight.rollout
        if rollout.exception() is None and not rollout.result().forest.has_failed:
            entries["forest"] = records.dumps(rollout.result().forest)
            # What could not be read would be an error of the resumed run, which comes too late.
            records.loads(entries["forest"])
            entries["staleness"] = self._in_flight.staleness
        return entries

    def restore(self, entries: Mapping[str, Any], step: int) -> None:
        """Continues after `step` completed steps with the entries that `state` returned."""
        self.data.set_state(entries["data"])
        if "forest" not in entries:
            return
        forest = records.loads(entries["forest"])
        self.data.draw(len(forest.questions))
        rollout = Future[Rollout]()
        # Another process made them: this one waited for nothing.
        rollout.set_result(Rollout(forest, dict.fromkeys(CAUSES, 0.0)))
        self._in_flight = InFlight(
            *(step, entries["data"], forest.questions, None, rollout, WaitingTimes()),
            entries["staleness"],
            is_whole=True,
        )

    def close(self) -> None:
        if self._in_flight is not None:
            self._in_flight.waiting.stop()
        self._pool.shutdown(cancel_futures=True)
