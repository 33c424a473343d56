"""Rows that wait for a slot, and the slots of each device, on the host."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_ragrl.sampling.context_cache import first_capacity
from jax_ragrl.sampling.contexts import KeptContexts, Reservation, common_length
from jax_ragrl.sampling.grouping import Draw, decode_floor, draws_by_prompt
from jax_ragrl.sampling.jobs import JobGrammar, SamplingJob, Shapes


class RowTask(NamedTuple):
    """A row to sample.

    Fields:
      job: any of the jobs that get the row.
      sibling: its number among the siblings of a job.
      draw: the numbers of the jobs that get the row.
      capacity: the size of its context at first.
    """

    job: SamplingJob
    sibling: int
    draw: Draw
    capacity: int


@dataclasses.dataclass
class WaitingPrompt:
    """A prompt, with its rows that have no slot yet.

    Fields:
      ids: int32 tokens.
      tasks: the rows.
    """

    ids: np.ndarray
    tasks: deque[RowTask]

    @property
    def capacity(self) -> int:
        """The size of the context of each row at first."""
        return self.tasks[0].capacity


class RowQueue:
    """The slots of one device, and the prompts that wait for one, on the host.

    Args:
      contexts: the index of the contexts that the device keeps.

    Attributes:
      waiting: prompts with rows that have no slot yet.
      slots: the row of each slot; None for a free one.
    """

    def __init__(self, contexts: KeptContexts) -> None:
        self.contexts = contexts
        self.waiting: list[WaitingPrompt] = []
        self.slots: list[RowTask | None] = []

    @property
    def rows_waiting(self) -> int:
        """The number of rows without a slot."""
        return sum(len(prompt.tasks) for prompt in self.waiting)

    def free_slots(self) -> list[int]:
        """Returns the numbers of the slots without a row."""
        return [i for i, task in enumerate(self.slots) if task is None]

    def live_slots(self) -> list[int]:
        """Returns the numbers of the slots with a row."""
        return [i for i, task in enumerate(self.slots) if task is not None]

    def next_wave(self, capacity: int) -> list[tuple[Reservation, list[RowTask]]]:
        """Takes rows for the free slots.

        Args:
          capacity: the present size of contexts. Rows wait behind a prompt that needs a larger one.

        Returns:
          A reservation per prompt, with the rows that get a slot now. A prompt waits for the next
          wave if it can share much of another one of this wave, or if no pages are free.
        """
        free, wave = len(self.free_slots()), list[tuple[Reservation, list[RowTask]]]()
        for prompt in self.waiting:
            if not free or prompt.capacity > capacity:
                break
            # The last token is run by the first decode step.
            ids = prompt.ids[:-1]
            if self._gains_by_waiting(ids, [reservation.ids for reservation, _ in wave]):
                continue
            reservation = self.contexts.reserve(ids)
            if reservation is None:
                assert wave, "the pages hold the longest context"
                break
            # If the slots do not hold all rows of a prompt, the rest finds its context later.
            tasks = [prompt.tasks.popleft() for _ in range(min(free, len(prompt.tasks)))]
            wave.append((reservation, tasks))
            free -= len(tasks)
        self.waiting = [prompt for prompt in self.waiting if prompt.tasks]
        return wave

    def place(
        self, rows: Sequence[tuple[Reservation, RowTask]]
    ) -> list[tuple[int, Reservation, RowTask]]:
        """Gives rows, each with its context, to the first free slots.

        Returns:
          The number of the slot, the context and the row, for each.
        """
        places = [
            (slot, context, task)
            for slot, (context, task) in zip(self.free_slots(), rows, strict=False)
        ]
        for slot, _, task in places:
            self.slots[slot] = task
        return places

    def free(self, slot: int) -> RowTask:
        """Frees a slot and returns its row."""
        task, self.slots[slot] = self.slots[slot], None
        assert task is not None, "only live slots are freed"
        return task

    def resize(self, count: int) -> list[int]:
        """Takes `count` slots, which hold all rows, and returns the old numbers of old ones."""
        numbers = (self.live_slots() + self.free_slots())[:count]
        self.slots = [self.slots[slot] for slot in numbers] + [None] * (count - len(numbers))
        return numbers

    def _gains_by_waiting(self, ids: np.ndarray, others: Sequence[np.ndarray]) -> bool:
        """Returns whether a prompt can share much more after other ones have been computed."""
        common = max((common_length(ids, other) for other in others), default=0)
        return common - self.contexts.known_tokens(ids) >= decode_floor()


def by_grammar(jobs: Sequence[SamplingJob], longest: int) -> list[list[int]]:
    """Groups the numbers of jobs that can share a program: those with one grammar.

    Args:
      jobs: the jobs.
      longest: the maximum of tokens of a prompt.

    Raises:
      ValueError: a prompt is longer.
    """
    groups: dict[JobGrammar, list[int]] = {}
    for i, job in enumerate(jobs):
        if len(job.ids) > longest:
            raise ValueError(f"a prompt of {len(job.ids)} tokens exceeds {longest}")
        groups.setdefault(job.grammar, []).append(i)
    return [groups[key] for key in sorted(groups)]


def waiting(
    jobs: Sequence[SamplingJob], numbers: Sequence[int], width: int, shapes: Shapes
) -> list[WaitingPrompt]:
    """Returns the distinct prompts of some jobs with their rows, in the order of the jobs.

    Args:
      jobs: all jobs.
      numbers: those to take.
      width: siblings per job.
      shapes: the static shapes of sampling.
    """
    prompts = []
    for draws in draws_by_prompt(jobs, numbers):
        job = jobs[draws[0][0]]
        size = first_capacity(len(job.ids), job.limit, shapes)
        rows = [RowTask(jobs[draw[0]], k, draw, size) for draw in draws for k in range(width)]
        prompts.append(WaitingPrompt(np.array(job.ids, np.int32), deque(rows)))
    return prompts
