"""Samples jobs in slots that are refilled as rows end, and keeps contexts for the next call.

A batch of unequal rows waits for its longest row, and a conversation of six turns computes its
first turn six times. Here
  - every row (a sibling of a job) has a slot, and a row that ends gives it to a waiting one;
  - the keys and values of prompts and actions are kept, and a prompt computes only what follows the
    longest of them that it begins with: the conversation so far, or the instructions of its role;
  - a prompt of several rows is computed once.

One turn of the loop in `_SlotRun.run`:

    waiting rows --refill--> slots --decode--> ended rows --store--> kept contexts
          |                                        |                       |
          +--- compute what no context has --------|-----------------------+
                                                 result

The order of work depends on the jobs alone, so a resumed run repeats it exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.compile_cache import report_compiling
from jax_ragrl.runtime.sharding import (
    commit_like,
    mesh_context,
    mesh_of,
    replicate,
    shard_batch,
    to_host,
)
from jax_ragrl.sampling.batches import grow_slots
from jax_ragrl.sampling.context_cache import ContextCache, copy_count, first_capacity
from jax_ragrl.sampling.counters import SamplingCounters
from jax_ragrl.sampling.decode import Grammar, check_stride
from jax_ragrl.sampling.grouping import decode_floor, fewest_rows, first_state, make_grammar
from jax_ragrl.sampling.jobs import Row, SamplingJob, Shapes
from jax_ragrl.sampling.row_queue import RowQueue, RowTask, WaitingPrompt, by_grammar, waiting
from jax_ragrl.sampling.slots import (
    SlotRows,
    SlotState,
    decode_name,
    decode_slots,
    empty_slots,
    keep_slots,
    load_slots,
)
from jax_ragrl.text.automaton import TokenAutomaton

# Slots are refilled when one of this many is free, on all devices together: fewer wait, but more
# programs are called.
REFILL_PART = 8

# Rows by the number of their job and their sibling number.
RowsByJob = dict[tuple[int, int], Row]


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
        rows: RowsByJob = {}
        # A grammar is an argument of the programs, so jobs with one grammar share the slots.
        for numbers in by_grammar(jobs, self.shapes.prompt_lengths[-1]):
            prompts = waiting(jobs, numbers, width)
            rows |= _SlotRun(self, [jobs[i] for i in numbers], prompts).run()
        return [[rows[i, k] for k in range(width)] for i in range(len(jobs))]


class _SlotRun:
    """The sampling of jobs with one grammar.

    Args:
      engine: the model, the kept contexts and the options.
      jobs: the jobs.
      prompts: their distinct prompts, with the rows of each.
    """

    def __init__(
        self, engine: SlotEngine, jobs: Sequence[SamplingJob], prompts: Sequence[WaitingPrompt]
    ) -> None:
        self.engine, self.mesh = engine, engine.mesh
        self.contexts = engine.contexts
        self.group = JobGroup(engine.tokenizer, jobs, engine.mesh)
        self.queues = [RowQueue(contexts) for contexts in engine.contexts.by_device]
        for prompt in prompts:
            self._queue_for(prompt).waiting.append(prompt)
        self.state = self._empty_slots(max(len(prompt.ids) for prompt in prompts))

    def run(self) -> RowsByJob:
        """Samples all rows."""
        rows: RowsByJob = {}
        # See the drawing at the top.
        while True:
            self._refill()
            if not any(queue.live_slots() for queue in self.queues):
                return rows
            self._decode()
            rows |= self._take_ended_rows()
            self._shrink()
            self._grow()

    @property
    def _slots(self) -> int:
        """The slots per device."""
        return len(self.queues[0].slots)

    @property
    def _is_waiting(self) -> bool:
        return any(queue.waiting for queue in self.queues)

    def _queue_for(self, prompt: WaitingPrompt) -> RowQueue:
        """The device that keeps most of a prompt; of several, the one with the fewest rows."""
        return min(
            self.queues,
            key=lambda queue: (
                -(queue.contexts.match(prompt.ids)[1] // decode_floor()),
                queue.rows_waiting,
            ),
        )

    def _empty_slots(self, longest: int) -> SlotState:
        shapes, sizes = self.engine.shapes, slot_counts(self.engine.shapes)
        most = max(queue.rows_waiting for queue in self.queues)
        count = next((n for n in sizes if n >= most), sizes[-1])
        for queue in self.queues:
            queue.slots = [None] * count
        # Longer actions make the contexts grow later, see `_grow`.
        self.contexts.grow(first_capacity(longest, self.group.limit, shapes))
        with mesh_context(self.mesh):
            state = empty_slots(
                self.engine.model.merge().config,
                count * len(self.queues),
                self.contexts.capacity,
                shapes.max_new_tokens,
                is_strict=self.group.automaton is not None,
            )
        return commit_like(state, self.engine.model)

    def _refill(self) -> None:
        """Puts waiting rows in the free slots, each with a copy of its prompt's context."""
        while any(queue.waiting and queue.free_slots() for queue in self.queues):
            # 1. Reserve contexts for the next prompts of every device, and compute them.
            waves = [queue.next_wave() for queue in self.queues]
            self.contexts.compute([[r for r, _ in wave] for wave in waves])
            # 2. Copy each to the slots of its rows.
            places = [
                queue.place([(r.target, task) for r, tasks in wave for task in tasks])
                for queue, wave in zip(self.queues, waves, strict=True)
            ]
            count = copy_count(max(map(len, places)))
            parts = [self.group.rows([task for _, _, task in part], count) for part in places]
            rows = jax.tree.map(lambda *columns: np.concatenate(columns), *parts)
            numbers = self.contexts.numbers
            with mesh_context(self.mesh):
                self.state = load_slots(
                    self.state,
                    self.contexts.arrays,
                    numbers([[context for _, context, _ in part] for part in places], count),
                    numbers([[slot for slot, _, _ in part] for part in places], count),
                    shard_batch(rows, self.mesh),
                )

    def _decode(self) -> None:
        """Decodes until slots can be refilled, few rows are live, or a context is full."""
        refill_at = self._slots - max(1, self._slots // REFILL_PART)
        refill_at_D = np.array([refill_at if q.waiting else -1 for q in self.queues], np.int32)
        # While rows wait, slots are refilled instead of given up.
        smaller = [n for n in slot_counts(self.engine.shapes) if n <= self._slots // 2]
        shrink_at = np.int32(-1 if self._is_waiting else max(smaller, default=0))
        name = decode_name(self._slots, self.contexts.capacity)
        with mesh_context(self.mesh), report_compiling(name):
            self.state, steps = decode_slots(
                self.engine.model,
                self.state,
                self.group.grammar,
                *replicate((refill_at_D, shrink_at), self.mesh),
                use_top_p=self.group.use_top_p,
                stride=check_stride(),
            )
        self.engine.counters.add_decode(self._slots * len(self.queues), int(to_host(steps)))

    def _take_ended_rows(self) -> RowsByJob:
        """Returns the rows that ended, keeps their contexts and frees their slots."""
        s, rows = self.state, RowsByJob()
        done_B, *samples = to_host((s.done_B, s.count_B, s.ids_BT, s.logps_BT, s.removed_B))
        contexts: list[list[tuple[int, np.ndarray]]] = []
        for d, queue in enumerate(self.queues):
            slots = [slot for slot in queue.live_slots() if done_B[d * self._slots + slot]]
            contexts.append([])
            for slot in slots:
                task, row = queue.free(slot), _row(d * self._slots + slot, *samples)
                rows |= {(i, task.sibling): row for i in task.draw}
                self.engine.counters.tokens += len(row.ids)
                # The last token was sampled, but not run.
                contexts[-1].append((slot, np.array((task.job.ids + row.ids)[:-1], np.int32)))
        if any(contexts):
            self.contexts.store(s.cache, contexts)
        return rows

    def _shrink(self) -> None:
        """Takes fewer slots if no row waits and few are live."""
        live = max(len(queue.live_slots()) for queue in self.queues)
        # A smaller step than half would not repay the copy.
        sizes = [n for n in slot_counts(self.engine.shapes) if live <= n <= self._slots // 2]
        if self._is_waiting or not live or not sizes:
            return
        numbers = [queue.shrink(sizes[0]) for queue in self.queues]
        with mesh_context(self.mesh):
            self.state = keep_slots(self.state, self.contexts.numbers(numbers, sizes[0]))

    def _grow(self) -> None:
        """Makes all contexts larger if one of a live row is full."""
        s = self.state
        done_B, length_B, count_B = to_host((s.done_B, s.rows.length_B, s.count_B))
        longest = int(np.max((length_B + count_B)[~done_B], initial=0))
        if longest > self.contexts.capacity:
            self.contexts.grow(longest)
            self.state = s._replace(cache=grow_slots(s.cache, self.contexts.capacity))


class JobGroup:
    """What all jobs with one grammar share: constraints and options of the programs.

    Args:
      tokenizer: as in `sample_jobs`.
      jobs: the jobs.
      mesh: the mesh of the model.
    """

    def __init__(self, tokenizer: Any, jobs: Sequence[SamplingJob], mesh: Mesh | None) -> None:
        regex = jobs[0].action_regex
        self.automaton: TokenAutomaton | None = tokenizer.automaton(regex) if regex else None
        self.grammar: Grammar = make_grammar(tokenizer, jobs[0], self.automaton, mesh)
        self.use_top_p = any(job.top_p < 1 for job in jobs)
        self.limit = max(job.limit for job in jobs)

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


def slot_counts(shapes: Shapes) -> list[int]:
    """Returns the numbers of slots per device, ascending: halves of the largest."""
    counts, least = [shapes.decode_rows], max(shapes.batch_sizes[0], fewest_rows())
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
