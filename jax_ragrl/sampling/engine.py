"""Samples jobs in slots that are refilled as rows end, and keeps contexts for the next call.

A batch of unequal rows waits for its longest row, and a conversation of six turns computes its
first turn six times. Here
  - every row (a sibling of a job) has a slot, and a row that ends gives it to a waiting one;
  - the keys and values of prompts and actions are kept, and a prompt computes only what follows the
    longest of them that it begins with: the conversation so far, or the instructions of its role;
  - a prompt of several rows is computed once.

One turn of the loop in `_SlotRun.run`:

    waiting rows --refill--> slots --decode--> ended rows --store--> kept contexts
       |   ^                                       |                       |
       +---|-- compute what no context has --------|-----------------------+
           |                                     result
           +--- jobs that have arrived meanwhile <-|

The order of work depends on the jobs and their arrival alone. If all arrive at the beginning, a
resumed run repeats it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.runtime.progress import progress
from jax_ragrl.runtime.sharding import (
    commit_like,
    mesh_context,
    mesh_of,
    replicate,
    shard_batch,
    to_host,
)
from jax_ragrl.sampling.batches import grow_slots
from jax_ragrl.sampling.context_cache import ContextCache, capacity_for, copy_count
from jax_ragrl.sampling.counters import SamplingCounters
from jax_ragrl.sampling.decode import Grammar, check_stride
from jax_ragrl.sampling.grouping import decode_floor, fewest_rows, first_state, make_grammar
from jax_ragrl.sampling.jobs import Row, SamplingJob, Shapes
from jax_ragrl.sampling.row_queue import RowQueue, RowTask, WaitingPrompt, by_grammar, waiting
from jax_ragrl.sampling.slots import (
    MAX_STEPS,
    DecodeLimits,
    SlotRows,
    SlotState,
    cut_contexts,
    decode_name,
    decode_slots,
    empty_slots,
    load_slots,
    resize_slots,
)
from jax_ragrl.text.automaton import TokenAutomaton

# Slots are refilled when one of this many is free, on all devices together: fewer wait, but more
# programs are called.
REFILL_PART = 8
# Steps between two looks at the jobs that have arrived.
STREAM_STEPS = 32

# A job and the number of its rows.
SizedJob = tuple[SamplingJob, int]


class SlotEngine:
    """Samples jobs of one model; contexts are kept from call to call.

    Args:
      model: a split decoder. If its parameters are on a mesh, rows are split over this mesh.
      tokenizer: as in `sample_jobs`.
      shapes: the static shapes; `decode_rows` is at least 1.
      counters: counts the work.
    """

    def __init__(
        self,
        model: SplitModel,
        tokenizer: Any,
        shapes: Shapes,
        counters: SamplingCounters | None = None,
    ) -> None:
        self.model, self.tokenizer, self.shapes = model, tokenizer, shapes
        self.counters = counters or SamplingCounters()
        self.mesh = mesh_of(model.params)
        self.contexts = ContextCache(model, shapes, self.counters)

    def sample(self, jobs: Sequence[SamplingJob], width: int) -> list[list[Row]]:
        """Returns for every job, in order, its `width` rows.

        Raises:
          ValueError: a prompt exceeds the longest prompt length.
        """
        rows: dict[int, list[Row]] = {}
        with progress("sample", "prompt", len(jobs)) as bar:
            # A grammar is an argument of the programs, so jobs with one grammar share the slots.
            for numbers in by_grammar(jobs, self.shapes.prompt_lengths[-1]):
                for n, job_rows in self.stream([(jobs[i], width) for i in numbers]):
                    rows[numbers[n]] = job_rows
                    bar.update(1)
        return [rows[i] for i in range(len(jobs))]

    def stream(
        self, jobs: Sequence[SizedJob], arrivals: Callable[[], Sequence[SizedJob]] | None = None
    ) -> Iterator[tuple[int, list[Row]]]:
        """Samples jobs with one grammar, and further ones that arrive meanwhile.

        Args:
          jobs: at least one job.
          arrivals: returns the jobs that have come since its last call; it is called after each
            program that decodes. None: no job comes.

        Yields:
          As soon as a job has all of its rows, its number, from 0 in the order of arrival, and the
          rows.
        """
        yield from _SlotRun(self, jobs, arrivals).run()


class _SlotRun:
    """The sampling of jobs with one grammar.

    Args:
      engine: the model, the kept contexts and the options.
      jobs, arrivals: as in `SlotEngine.stream`.

    Attributes:
      jobs: all jobs until now.
      rows: the rows of each job until now, by sibling.
      group: the grammar and the options of the jobs.
      queues: the slots and the waiting rows of each device.
      state: the slots on the devices.
    """

    def __init__(
        self,
        engine: SlotEngine,
        jobs: Sequence[SizedJob],
        arrivals: Callable[[], Sequence[SizedJob]] | None,
    ) -> None:
        self.engine, self.mesh, self.arrivals = engine, engine.mesh, arrivals
        self.shapes, self.contexts = engine.shapes, engine.contexts
        self.jobs: list[SizedJob] = []
        self.rows: list[dict[int, Row]] = []
        self.group = JobGroup(engine.tokenizer, jobs[0][0], engine.mesh)
        self.queues = [RowQueue(contexts) for contexts in engine.contexts.by_device]
        self._queue(jobs)
        self.state = self._empty_slots()

    def run(self) -> Iterator[tuple[int, list[Row]]]:
        """Samples all rows; yields as `SlotEngine.stream`."""
        # See the drawing at the top.
        while any(queue.waiting or queue.live_slots() for queue in self.queues):
            self._fit_slots()
            self._refill()
            self._decode()
            yield from self._complete(self._take_ended_rows())
            if self.arrivals:
                self._queue(self.arrivals())

    @property
    def _slots(self) -> int:
        """The slots per device."""
        return len(self.queues[0].slots)

    @property
    def _is_waiting(self) -> bool:
        return any(queue.waiting for queue in self.queues)

    def _queue(self, jobs: Sequence[SizedJob]) -> None:
        """Adds jobs, whose rows wait on the device that suits their prompt."""
        first = len(self.jobs)
        self.jobs += jobs
        self.rows += [{} for _ in jobs]
        self.group.add(job for job, _ in jobs)
        for width in sorted({width for _, width in jobs}):
            numbers = [first + i for i, (_, own) in enumerate(jobs) if own == width]
            for prompt in waiting([job for job, _ in self.jobs], numbers, width, self.shapes):
                self._queue_for(prompt).waiting.append(prompt)
        if self.shapes.slot_tokens:
            # While the longest are decoded there are the fewest slots.
            for queue in self.queues:
                queue.waiting.sort(key=lambda prompt: -prompt.capacity)

    def _queue_for(self, prompt: WaitingPrompt) -> RowQueue:
        """The device that keeps most of a prompt; of several, the one with the fewest rows."""
        return min(
            self.queues,
            key=lambda queue: (
                -(queue.contexts.known_tokens(prompt.ids) // decode_floor()),
                queue.rows_waiting,
            ),
        )

    def _empty_slots(self) -> SlotState:
        capacity, count = self._sizes()
        self.contexts.capacity = capacity
        for queue in self.queues:
            queue.resize(count)
        with mesh_context(self.mesh):
            state = empty_slots(
                self.engine.model.merge().config,
                count * len(self.queues),
                capacity,
                self.shapes.max_new_tokens,
                is_strict=self.group.automaton is not None,
            )
        return commit_like(state, self.engine.model)

    def _sizes(self) -> tuple[int, int]:
        """Returns the tokens per context and the slots per device that the rows need.

        A longer prompt that allows fewer slots than there are live rows waits for their end.
        """
        shapes, live = self.shapes, max(len(queue.live_slots()) for queue in self.queues)
        capacity = self._capacity_needed()
        if live > slot_counts(shapes, capacity)[-1]:
            capacity = self.contexts.capacity
        sizes = slot_counts(shapes, capacity)
        rows = max(len(queue.live_slots()) + queue.rows_waiting for queue in self.queues)
        return capacity, next((n for n in sizes if n >= rows), sizes[-1])

    def _capacity_needed(self) -> int:
        """Returns the size of contexts for all live and waiting rows."""
        rows = [row for queue in self.queues for row in (*queue.waiting, *queue.slots)]
        capacities = [row.capacity for row in rows if row is not None]
        if not self.shapes.slot_tokens:
            # Contexts grow with long actions, and then keep their size, which has its programs.
            longest = capacity_for(self._longest_live(), self.shapes)
            capacities += [self.contexts.capacity, longest]
        return max(capacities)

    def _longest_live(self) -> int:
        """Returns the tokens of the longest live row; 1 without one."""
        if not any(queue.live_slots() for queue in self.queues):
            return 1
        s = self.state
        done_B, length_B, count_B = to_host((s.done_B, s.rows.length_B, s.count_B))
        return int(np.max((length_B + count_B)[~done_B], initial=1))

    def _fit_slots(self) -> None:
        """Gives the slots the size and the number that their rows need."""
        capacity, count = self._sizes()
        # What becomes smaller is first, because it needs the least memory.
        if capacity < self.contexts.capacity:
            with mesh_context(self.mesh):
                cache = cut_contexts(self.state.cache, capacity)
            self.state = self.state._replace(cache=cache)
        most = slot_counts(self.shapes, capacity)[-1]
        # A smaller step than half would not repay the copy.
        is_wasteful = not self._is_waiting and count <= self._slots // 2
        if count > self._slots or most < self._slots or is_wasteful:
            numbers = [queue.resize(count) for queue in self.queues]
            with mesh_context(self.mesh):
                self.state = resize_slots(self.state, self.contexts.numbers(numbers, count))
        if capacity > self.contexts.capacity:
            self.state = self.state._replace(cache=grow_slots(self.state.cache, capacity))
        self.contexts.capacity = capacity

    def _refill(self) -> None:
        """Puts waiting rows in the free slots, each with a copy of its prompt's context."""
        while any(queue.waiting and queue.free_slots() for queue in self.queues):
            # 1. Reserve contexts for the next prompts of every device, and compute them.
            waves = [queue.next_wave(self.contexts.capacity) for queue in self.queues]
            if not any(waves):
                return  # the next prompts need larger contexts
            self.contexts.compute([[r for r, _ in wave] for wave in waves])
            # 2. Copy each to the slots of its rows.
            places = [
                queue.place([(r, task) for r, tasks in wave for task in tasks])
                for queue, wave in zip(self.queues, waves, strict=True)
            ]
            count = copy_count(max(map(len, places)))
            parts = [self.group.rows([task for _, _, task in part], count) for part in places]
            rows = jax.tree.map(lambda *columns: np.concatenate(columns), *parts)
            slots = [[slot for slot, _, _ in part] for part in places]
            contexts = [[reservation for _, reservation, _ in part] for part in places]
            with mesh_context(self.mesh):
                self.state = load_slots(
                    self.state,
                    self.contexts.pages,
                    self.contexts.tables(contexts, count),
                    self.contexts.numbers(slots, count),
                    shard_batch(rows, self.mesh),
                )

    def _decode(self) -> None:
        """Decodes until slots can be refilled, few rows are live, or a context is full."""
        limits = DecodeLimits(
            *self._row_limits(), steps=np.int32(STREAM_STEPS if self.arrivals else MAX_STEPS)
        )
        kind = self.group.grammar.describe(use_top_p=self.group.use_top_p)
        name = decode_name(self._slots, self.contexts.capacity, kind)
        with mesh_context(self.mesh), report_compiling(name):
            self.state, steps = decode_slots(
                self.engine.model,
                self.state,
                self.group.grammar,
                replicate(limits, self.mesh),
                use_top_p=self.group.use_top_p,
                stride=check_stride(),
            )
        self.engine.counters.add_decode(self._slots * len(self.queues), int(to_host(steps)))

    def _row_limits(self) -> tuple[np.ndarray, np.int32]:
        """Returns the numbers of live rows at which a program ends, see `DecodeLimits`."""
        capacity, is_waiting_D = self.contexts.capacity, [bool(q.waiting) for q in self.queues]
        smaller = [n for n in slot_counts(self.shapes, capacity) if n <= self._slots // 2]
        if any(q.waiting and q.waiting[0].capacity > capacity for q in self.queues):
            # The next prompts need longer contexts, and these allow fewer slots.
            is_waiting_D = [False] * len(self.queues)
            smaller = slot_counts(self.shapes, self._capacity_needed())
        # While rows wait, slots are refilled instead of given up.
        refill_at = self._slots - max(1, self._slots // REFILL_PART)
        refill_at_D = np.where(is_waiting_D, refill_at, -1).astype(np.int32)
        return refill_at_D, np.int32(-1 if any(is_waiting_D) else max(smaller, default=0))

    def _complete(self, rows: Sequence[tuple[RowTask, Row]]) -> Iterator[tuple[int, list[Row]]]:
        """Gives rows to their jobs; yields the jobs that have all of theirs."""
        for task, row in rows:
            for i in task.draw:
                self.rows[i][task.sibling] = row
                width = self.jobs[i][1]
                if len(self.rows[i]) == width:
                    yield i, [self.rows[i][k] for k in range(width)]

    def _take_ended_rows(self) -> list[tuple[RowTask, Row]]:
        """Returns the rows that ended, keeps their contexts and frees their slots."""
        s, rows = self.state, list[tuple[RowTask, Row]]()
        done_B, *samples = to_host((s.done_B, s.count_B, s.ids_BT, s.logps_BT, s.removed_B))
        contexts: list[list[tuple[int, np.ndarray]]] = []
        for d, queue in enumerate(self.queues):
            slots = [slot for slot in queue.live_slots() if done_B[d * self._slots + slot]]
            contexts.append([])
            for slot in slots:
                task, row = queue.free(slot), _row(d * self._slots + slot, *samples)
                rows.append((task, row))
                self.engine.counters.tokens += len(row.ids)
                # The last token was sampled, but not run.
                contexts[-1].append((slot, np.array((task.job.ids + row.ids)[:-1], np.int32)))
        if any(contexts):
            self.contexts.store(s.cache, contexts)
        return rows


class JobGroup:
    """What all jobs with one grammar share: constraints and options of the programs.

    Args:
      tokenizer: as in `sample_jobs`.
      job: the first of the jobs.
      mesh: the mesh of the model.

    Attributes:
      automaton, grammar: the constraints of the actions.
      use_top_p: whether a job of the group has a nucleus.
      limit: the maximum of new tokens of any job.
    """

    def __init__(self, tokenizer: Any, job: SamplingJob, mesh: Mesh | None) -> None:
        regex = job.action_regex
        self.automaton: TokenAutomaton | None = tokenizer.automaton(regex) if regex else None
        self.grammar: Grammar = make_grammar(tokenizer, job, self.automaton, mesh)
        self.use_top_p, self.limit = job.top_p < 1, job.limit

    def add(self, jobs: Iterable[SamplingJob]) -> None:
        """Adds the options of further jobs."""
        for job in jobs:
            self.use_top_p |= job.top_p < 1
            self.limit = max(self.limit, job.limit)

    def rows(self, tasks: Sequence[RowTask], count: int) -> SlotRows:
        """Returns the parameters of some rows, with padding up to `count`, on the host."""

        def column(value: Callable[[RowTask], Any], dtype: Any) -> np.ndarray:
            out = np.zeros(count, dtype)
            out[: len(tasks)] = [value(task) for task in tasks]
            return out

        # Padding is not stored, so zeros serve.
        automaton = self.automaton
        return SlotRows(
            last_B=column(lambda t: t.job.ids[-1], np.int32),
            length_B=column(lambda t: len(t.job.ids), np.int32),
            seed_B=column(lambda t: t.job.seed, np.uint32),
            sibling_B=column(lambda t: t.sibling, np.int32),
            temperature_B=column(lambda t: t.job.temperature, np.float32),
            top_p_B=column(lambda t: t.job.top_p, np.float32),
            limit_B=column(lambda t: t.job.limit, np.int32),
            grammar_state_B=(
                None
                if automaton is None
                else column(lambda t: first_state(automaton, t.job), np.int32)
            ),
        )


def slot_counts(shapes: Shapes, capacity: int) -> list[int]:
    """Returns the numbers of slots per device, ascending: halves of the largest.

    Args:
      shapes: the static shapes of sampling.
      capacity: tokens per context.
    """
    most = shapes.decode_rows
    while shapes.slot_tokens and most > 1 and most * capacity > shapes.slot_tokens:
        most //= 2
    counts, least = [most], max(shapes.batch_sizes[0], fewest_rows())
    while counts[-1] // 2 >= least:
        counts.append(counts[-1] // 2)
    return counts[::-1]


def _row(
    b: int,
    count_B: np.ndarray,
    ids_BT: np.ndarray,
    logps_BT: np.ndarray,
    removed_B: np.ndarray | None,
) -> Row:
    """Returns the tokens of one slot."""
    n = int(count_B[b])
    removed = None if removed_B is None else float(removed_B[b]) / max(n, 1)
    return Row(tuple(ids_BT[b, :n].tolist()), tuple(logps_BT[b, :n].tolist()), removed)
