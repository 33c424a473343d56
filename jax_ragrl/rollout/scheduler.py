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


def run_branches(rollout: Rollout, live: Sequence[Branch], *, lockstep: bool) -> None:
    """Rolls out branches until all have ended.

    Args:
      rollout: the batch; gets the nodes, in no particular order.
      live: the branches at the root.
      lockstep: whether all branches wait for each other in every round.
    """
    calls, failures = rollout.calls, rollout.failures
    # A model on the devices runs in the thread of the sampler, after it: devices of a mesh must
    # start their programs in one order on every host.
    models = {Search: rollout.environment.retriever, CallLLM: rollout.environment.llm}
    on_device = [kind for kind, model in models.items() if is_on_device(model)]
    queues: dict[type, list[WaitingEffect]] = {kind: [] for kind in calls}
    arrivals = queue.SimpleQueue[tuple[list[WaitingEffect], Future[Any]]]()
    in_workers = collections.Counter[type]()
    ready: list[WaitingBranch] = []  # branches that have all their replies

    def ask(branches: Iterable[Branch]) -> None:
        """Queues the effects of branches; a failed question costs nothing more."""
        for branch in branches:
            if branch.question in failures:
                continue
            effects = rollout.effects_of(branch)
            waits = [slot for slot, effect in enumerate(effects) if not isinstance(effect, Done)]
            waiting = WaitingBranch(branch, effects, [None] * len(effects), len(waits))
            for slot in waits:
                pending = PendingEffect(branch, slot, effects[slot])
                queues[type(effects[slot])].append(WaitingEffect(waiting, pending))
            if not waits:
                ready.append(waiting)

    def take(kind: type) -> list[WaitingEffect]:
        batch, queues[kind] = queues[kind], []
        return [effect for effect in batch if effect.pending.branch.question not in failures]

    def submit(pool: ThreadPoolExecutor, kind: type, batch: list[WaitingEffect]) -> None:
        if batch:
            in_workers[kind] += 1
            call = pool.submit(calls[kind], [effect.pending for effect in batch])
            call.add_done_callback(lambda done: arrivals.put((batch, done)))

    def start_workers() -> None:
        if CallLLM not in on_device:
            batch = take(CallLLM)
            for part in [batch] if lockstep else [[effect] for effect in batch]:
                submit(callers, CallLLM, part)
        # A retriever need not accept concurrent calls.
        if Search not in on_device and not in_workers[Search]:
            submit(searcher, Search, take(Search))

    def reply(batch: Sequence[WaitingEffect], replies: Sequence[EffectReply]) -> None:
        for (waiting, pending), value in zip(batch, replies, strict=True):
            waiting.replies[pending.slot] = value
            waiting.missing -= 1
            if not waiting.missing:
                ready.append(waiting)
        if not lockstep:
            advance()

    def advance() -> None:
        """Advances the branches that are ready, and what follows them without waiting."""
        while ready:
            batch = sorted(ready, key=lambda waiting: waiting.branch.place)
            ready.clear()
            for waiting in batch:
                ask(rollout.advance(waiting.branch, waiting.effects, waiting.replies))
            if lockstep:
                return

    def take_arrivals(*, wait: bool) -> None:
        """Takes the replies that have arrived; with `wait`, of at least one call."""
        while any(in_workers.values()) and (wait or not arrivals.empty()):
            batch, call = arrivals.get()
            in_workers[type(batch[0].pending.effect)] -= 1
            reply(batch, call.result())
            wait = False

    def sample_stream(batch: list[WaitingEffect]) -> None:
        """Samples actions, and those that arrive meanwhile."""

        def arriving() -> list[PendingEffect]:
            start_workers()
            take_arrivals(wait=False)
            # Other models on the devices have their turn when the actions in the slots have ended.
            if any(queues[kind] for kind in on_device):
                return []
            further = take(Generate)
            batch.extend(further)
            return [effect.pending for effect in further]

        actions = rollout.stream_actions([effect.pending for effect in batch], arriving)
        with contextlib.closing(actions):
            for number, action in actions:
                reply([batch[number]], [action])

    # Searches have their own thread: they would wait for all calls that came before them.
    with ThreadPoolExecutor(WORKERS) as callers, ThreadPoolExecutor(1) as searcher:
        try:
            ask(live)
            while ready or any(queues.values()) or any(in_workers.values()):
                start_workers()
                runs = False
                for kind in (Generate, *on_device):
                    if batch := take(kind):
                        runs = True
                        if kind is Generate and not lockstep:
                            sample_stream(batch)
                        else:
                            reply(batch, calls[kind]([effect.pending for effect in batch]))
                take_arrivals(wait=not runs and (lockstep or not ready))
                if not lockstep or not (any(queues.values()) or any(in_workers.values())):
                    advance()
        except BaseException:
            # Calls that have not begun would delay the error.
            callers.shutdown(wait=False, cancel_futures=True)
            raise
