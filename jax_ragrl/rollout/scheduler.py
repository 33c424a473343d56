"""The scheduler of a rollout: one queue per kind of effect; branches continue together, or alone.

    branches that advance
        |    ^
        |    +------ replies: of a branch alone, or with lockstep of all -----+
        |                                                                     |
        +-- Generate --> one batched call or stream at a time, in this thread +
        +-- Search ----> one batched call at a time, in a worker -------------+
        +-- CallLLM ---> with lockstep one batched call; otherwise one call --+
                         per effect, each in a worker

In lockstep all branches wait for each other in every round. Without it a slow reply of the language
model delays its own branch alone, and with slots (`shapes.decode_rows`) an action whose branch
continues takes the next free slots of the running sampler. Seeds and the order of nodes, and so the
forest, are equal. But the speed of servers then decides which actions share a batch, and programs
of other shapes round differently: a resumed run equals an undisturbed one up to rounding errors.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from jax_ragrl.rollout.branches import BatchedCall, Branch, EffectReply, PendingEffect
from jax_ragrl.rollout.effects import CallLLM, Done, Effect, Generate, Search
from jax_ragrl.rollout.tree import Action
from jax_ragrl.runtime import progress
from jax_ragrl.runtime.dispatch import is_on_device

# Threads that call the language model; further calls wait. Clients of servers have lower limits.
WORKERS = 512


@dataclasses.dataclass
class WaitingBranch:
    """A branch that waits for the replies to its effects.

    Fields:
      branch: the branch.
      effects: all of its effects.
      replies: their replies; None as long as there is none.
      missing: the number of replies to wait for.
    """

    branch: Branch
    effects: tuple[Effect, ...]
    replies: list[EffectReply]
    missing: int


class WaitingEffect(NamedTuple):
    """An effect, and the branch that waits for it."""

    waiting: WaitingBranch
    pending: PendingEffect


class Rollout(Protocol):
    """The parts of `collect.BatchRollout` that perform effects and advance branches.

    Fields:
      environment: the models and the retriever.
      failures: error messages by the index of the question.
    """

    environment: Any
    failures: dict[int, str]

    @property
    def calls(self) -> Mapping[type, BatchedCall]: ...

    def stream_actions(
        self,
        pending: Sequence[PendingEffect],
        arrivals: Callable[[], Sequence[PendingEffect]],
    ) -> Generator[tuple[int, Sequence[Action]]]:
        """Samples actions, and further ones that arrive; yields each with its number."""
        ...

    def advance(
        self, branch: Branch, effects: tuple[Effect, ...], replies: list[EffectReply]
    ) -> list[Branch]:
        """Returns the branches that follow `branch` after the `replies` to all its `effects`."""
        ...


def run_branches(rollout: Rollout, live: Sequence[Branch], *, lockstep: bool) -> None:
    """Rolls out branches until all have ended.

    Args:
      rollout: the batch; gets the nodes, in no particular order.
      live: the branches at the root.
      lockstep: whether all branches wait for each other in every round.
    """
    # Searches have their own thread: they would wait for all calls that came before them.
    with ThreadPoolExecutor(WORKERS) as callers, ThreadPoolExecutor(1) as searcher:
        try:
            _Scheduler(rollout, lockstep, {CallLLM: callers, Search: searcher}).run(live)
        except BaseException:
            # Calls that have not begun would delay the error.
            callers.shutdown(wait=False, cancel_futures=True)
            raise


class _Scheduler:
    """The queues of a rollout.

    Args:
      rollout: the batch.
      lockstep: whether all branches wait for each other.
      pools: the workers of searches and of calls of the language model.

    Attributes:
      queues: the effects that wait for a batched call, by kind.
      in_workers: the number of calls of each kind that are in a worker.
      arrivals: the effects of each call that a worker has ended, and its result.
      ready: the branches that have all their replies.
      live: the number of branches of each question that have not ended.
      unfinished: the number of questions with such branches.
    """

    def __init__(
        self, rollout: Rollout, lockstep: bool, pools: Mapping[type, ThreadPoolExecutor]
    ) -> None:
        self.rollout, self.lockstep, self.pools = rollout, lockstep, pools
        # A model on the devices runs in the thread of the sampler, after it: devices of a mesh must
        # start their programs in one order on every host.
        models = {Search: rollout.environment.retriever, CallLLM: rollout.environment.llm}
        self.on_device = [kind for kind, model in models.items() if is_on_device(model)]
        self.queues: dict[type, list[WaitingEffect]] = {kind: [] for kind in rollout.calls}
        self.in_workers = collections.Counter[type]()
        self.arrivals = queue.SimpleQueue[tuple[list[WaitingEffect], Future[Any]]]()
        self.ready: list[WaitingBranch] = []
        self.live = collections.Counter[int]()
        self.unfinished = 0

    def run(self, live: Sequence[Branch]) -> None:
        """See the drawing at the top."""
        self._ask(live)
        self.unfinished = len(self.live)
        while self.ready or self._is_waiting():
            self._start_workers()
            runs = False
            for kind in (Generate, *self.on_device):
                if batch := self._take(kind):
                    runs = True
                    if kind is Generate and not self.lockstep:
                        self._stream(batch)
                    else:
                        self._reply(batch, self._call(kind, batch))
            self._take_arrivals(wait=not runs and (self.lockstep or not self.ready))
            if not self.lockstep or not self._is_waiting():
                self._advance()

    def _is_waiting(self) -> bool:
        return any(self.queues.values()) or any(self.in_workers.values())

    def _ask(self, branches: Iterable[Branch]) -> None:
        """Queues the effects of branches; a failed question costs nothing more."""
        for branch in branches:
            if branch.question in self.rollout.failures:
                continue
            self.live[branch.question] += 1
            effects = branch.execution.effects
            waits = [slot for slot, effect in enumerate(effects) if not isinstance(effect, Done)]
            waiting = WaitingBranch(branch, effects, [None] * len(effects), len(waits))
            for slot in waits:
                pending = PendingEffect(branch, slot, effects[slot])
                self.queues[type(effects[slot])].append(WaitingEffect(waiting, pending))
            if not waits:
                self.ready.append(waiting)

    def _advance(self) -> None:
        """Advances the branches that are ready, and without lockstep those that they lead to."""
        while self.ready:
            batch = sorted(self.ready, key=lambda waiting: waiting.branch.place)
            self.ready.clear()
            for waiting in batch:
                branch = waiting.branch
                self._ask(self.rollout.advance(branch, waiting.effects, waiting.replies))
                self.live[branch.question] -= 1
            questions = {
                n for n, count in self.live.items() if count
            } - self.rollout.failures.keys()
            progress.advance("question", self.unfinished - len(questions))
            self.unfinished = len(questions)
            if self.lockstep:
                return

    def _take(self, kind: type) -> list[WaitingEffect]:
        """Takes the effects of a kind that wait; effects of failed questions are dropped."""
        batch, self.queues[kind] = self.queues[kind], []
        failures = self.rollout.failures
        return [effect for effect in batch if effect.pending.branch.question not in failures]

    def _call(self, kind: type, batch: Sequence[WaitingEffect]) -> Sequence[EffectReply]:
        return self.rollout.calls[kind]([effect.pending for effect in batch])

    def _start_workers(self) -> None:
        """Starts the calls that the devices do not perform."""
        if CallLLM not in self.on_device:
            batch = self._take(CallLLM)
            for part in [batch] if self.lockstep else [[effect] for effect in batch]:
                self._submit(CallLLM, part)
        # A retriever need not accept concurrent calls.
        if Search not in self.on_device and not self.in_workers[Search]:
            self._submit(Search, self._take(Search))

    def _submit(self, kind: type, batch: list[WaitingEffect]) -> None:
        if batch:
            self.in_workers[kind] += 1
            call = self.pools[kind].submit(self._call, kind, batch)
            call.add_done_callback(lambda done: self.arrivals.put((batch, done)))

    def _take_arrivals(self, *, wait: bool) -> None:
        """Takes the replies that have arrived; with `wait`, of at least one call."""
        while any(self.in_workers.values()) and (wait or not self.arrivals.empty()):
            batch, call = self.arrivals.get()
            self.in_workers[type(batch[0].pending.effect)] -= 1
            self._reply(batch, call.result())
            wait = False

    def _stream(self, batch: list[WaitingEffect]) -> None:
        """Samples actions, and those that arrive meanwhile."""

        def arrivals() -> list[PendingEffect]:
            self._start_workers()
            self._take_arrivals(wait=False)
            # Other models on the devices have their turn when the actions in the slots have ended.
            if any(self.queues[kind] for kind in self.on_device):
                return []
            further = self._take(Generate)
            batch.extend(further)
            return [effect.pending for effect in further]

        actions = self.rollout.stream_actions([effect.pending for effect in batch], arrivals)
        with contextlib.closing(actions):
            for number, action in actions:
                self._reply([batch[number]], [action])

    def _reply(self, batch: Sequence[WaitingEffect], replies: Sequence[EffectReply]) -> None:
        for (waiting, pending), reply in zip(batch, replies, strict=True):
            waiting.replies[pending.slot] = reply
            waiting.missing -= 1
            if not waiting.missing:
                self.ready.append(waiting)
        if not self.lockstep:
            self._advance()
