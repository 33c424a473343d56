"""Rollouts without lockstep: a branch continues as soon as its own replies have arrived.

    branches that advance
        |    ^
        |    +----------- replies, in the order of their arrival <----+
        |                                                             |
        +-- Generate --> one stream at a time, in this thread --------+
        +-- Search ----> one batched call at a time, in a worker -----+
        +-- CallLLM ---> one call per effect, each in a worker -------+

A slow reply of the language model delays its own branch alone. With slots (`shapes.decode_rows`) an
action whose branch continues takes the next free slots of the running sampler; in batches it waits
for the batches that run. Seeds and the order of nodes, and so the forest, equal those in
lockstep. But the speed of servers decides which actions share a batch, and programs of other shapes
round differently: a resumed run equals an undisturbed one up to rounding errors.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import queue
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from jax_ragrl.rollout.branches import (
    BatchedCall,
    Branch,
    EffectReply,
    PendingEffect,
)
from jax_ragrl.rollout.effects import CallLLM, Done, Effect, Generate, Search
from jax_ragrl.rollout.tree import Action
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

    def effects_of(self, branch: Branch) -> tuple[Effect, ...]: ...

    def advance(
        self, branch: Branch, effects: tuple[Effect, ...], replies: list[EffectReply]
    ) -> list[Branch]:
        """Returns the branches that follow `branch` after the `replies` to all its `effects`."""
        ...


def run_early(rollout: Rollout, live: Sequence[Branch]) -> None:
    """Rolls out branches until all have ended; a branch waits for its own replies alone.

    Args:
      rollout: the batch; gets the nodes, in no particular order.
      live: the branches at the root.
    """
    # Searches have their own thread: they would wait for all calls that came before them.
    with ThreadPoolExecutor(WORKERS) as callers, ThreadPoolExecutor(1) as searcher:
        pools: dict[type, ThreadPoolExecutor] = {CallLLM: callers, Search: searcher}
        try:
            _EarlyRollout(rollout, pools).run(live)
        except BaseException:
            # Calls that have not begun would delay the error.
            callers.shutdown(wait=False, cancel_futures=True)
            raise


class _EarlyRollout:
    """The queues of a rollout without lockstep.

    Args:
      rollout: the batch.
      pools: the workers of searches and of calls of the language model.

    Attributes:
      queues: the effects that wait for a batched call, by kind.
      arrivals: the effects of each call that a worker has ended, and its result.
      in_workers: the number of calls of each kind that are in a worker.
    """

    def __init__(self, rollout: Rollout, pools: Mapping[type, ThreadPoolExecutor]) -> None:
        self.rollout, self.pools = rollout, pools
        self.calls, environment = rollout.calls, rollout.environment
        # A model on the devices runs in the thread of the sampler, as in lockstep.
        models = {Search: environment.retriever, CallLLM: environment.llm}
        self.on_device = [kind for kind, model in models.items() if is_on_device(model)]
        self.queues: dict[type, list[WaitingEffect]] = {kind: [] for kind in self.calls}
        self.arrivals: queue.SimpleQueue[tuple[list[WaitingEffect], Future[Any]]] = (
            queue.SimpleQueue()
        )
        self.in_workers = collections.Counter[type]()

    def run(self, live: Sequence[Branch]) -> None:
        """See the drawing at the top."""
        self._ask(live)
        while any(self.queues.values()) or any(self.in_workers.values()):
            self._start_workers()
            ran = self._run_devices()
            self._take_arrivals(wait=not ran)

    def _ask(self, branches: Iterable[Branch]) -> None:
        """Queues the effects of branches; a branch that waits for nothing advances at once."""
        for branch in branches:
            effects = self.rollout.effects_of(branch)
            waits = [slot for slot, effect in enumerate(effects) if not isinstance(effect, Done)]
            waiting = WaitingBranch(branch, effects, [None] * len(effects), len(waits))
            for slot in waits:
                pending = PendingEffect(branch, slot, effects[slot])
                self.queues[type(effects[slot])].append(WaitingEffect(waiting, pending))
            if not waits:
                self._advance(waiting)

    def _advance(self, waiting: WaitingBranch) -> None:
        # A failed question costs nothing more.
        if waiting.branch.question not in self.rollout.failures:
            self._ask(self.rollout.advance(waiting.branch, waiting.effects, waiting.replies))

    def _next_batch(self, kind: type) -> list[WaitingEffect]:
        """Takes the effects of a kind that wait; effects of failed questions are dropped."""
        batch, self.queues[kind] = self.queues[kind], []
        failures = self.rollout.failures
        return [effect for effect in batch if effect.pending.branch.question not in failures]

    def _start_workers(self) -> None:
        """Starts the calls that the devices do not perform."""
        if CallLLM not in self.on_device:
            for effect in self._next_batch(CallLLM):
                self._submit(CallLLM, [effect])
        # A retriever need not accept concurrent calls.
        if Search not in self.on_device and not self.in_workers[Search]:
            self._submit(Search, self._next_batch(Search))

    def _submit(self, kind: type, batch: list[WaitingEffect]) -> None:
        if batch:
            self.in_workers[kind] += 1
            call = self.pools[kind].submit(self.calls[kind], [effect.pending for effect in batch])
            call.add_done_callback(lambda done: self.arrivals.put((batch, done)))

    def _run_devices(self) -> bool:
        """Performs the effects that wait for the devices: actions, then a batched call per kind.

        Returns:
          Whether there were any.
        """
        ran = self._sample()
        for kind in self.on_device:
            if batch := self._next_batch(kind):
                self._reply(batch, self.calls[kind]([effect.pending for effect in batch]))
                ran = True
        return ran

    def _sample(self) -> bool:
        """Samples the actions that wait, and those that arrive meanwhile.

        Returns:
          Whether there were any.
        """
        batch = self._next_batch(Generate)
        if not batch:
            return False

        def arrivals() -> list[PendingEffect]:
            self._start_workers()
            self._take_arrivals(wait=False)
            # Other models on the devices have their turn when the actions in the slots have ended.
            if any(self.queues[kind] for kind in self.on_device):
                return []
            further = self._next_batch(Generate)
            batch.extend(further)
            return [effect.pending for effect in further]

        actions = self.rollout.stream_actions([effect.pending for effect in batch], arrivals)
        with contextlib.closing(actions):
            for number, reply in actions:
                self._reply([batch[number]], [reply])
        return True

    def _take_arrivals(self, *, wait: bool) -> None:
        """Takes the replies that have arrived; with `wait`, of at least one call."""
        while any(self.in_workers.values()) and (wait or not self.arrivals.empty()):
            batch, call = self.arrivals.get()
            self.in_workers[type(batch[0].pending.effect)] -= 1
            self._reply(batch, call.result())
            wait = False

    def _reply(self, batch: Sequence[WaitingEffect], replies: Sequence[EffectReply]) -> None:
        for (waiting, pending), reply in zip(batch, replies, strict=True):
            waiting.replies[pending.slot] = reply
            waiting.missing -= 1
            if not waiting.missing:
                self._advance(waiting)
