"""Samples actions of a policy: requests are padded to a few static shapes, sampled and trimmed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.free_work import count_elements, free_tokens
from jax_ragrl.runtime.progress import progress
from jax_ragrl.runtime.sharding import data_parallel_size, mesh_of
from jax_ragrl.runtime.small_programs import start, uses_one_core
from jax_ragrl.sampling.batches import (
    Finish,
    PartialSamples,
    PromptBatch,
    SamplingCounters,
)
from jax_ragrl.sampling.contexts import PAGE
from jax_ragrl.sampling.decode import CHECK_STRIDE, Samples
from jax_ragrl.sampling.grouping import (
    Chunk,
    Draw,
    batch_jobs,
    make_grammar,
    pad_ids,
    pad_prompts,
)
from jax_ragrl.sampling.jobs import Row as Row
from jax_ragrl.sampling.jobs import SamplingJob as SamplingJob
from jax_ragrl.sampling.jobs import Shapes as Shapes
from jax_ragrl.sampling.pages import ContextCache
from jax_ragrl.text.tokenizer import ChatTokenizer

# For every job, its rows.
JobSamples = list[list[Row]]


class JobSampler:
    """Samples jobs of one model, in batches.

    A job gets the same tokens whatever the other jobs are; jobs with equal prompts are computed
    together, see `sampling.grouping`. If the model is on a mesh, batches are split over this mesh.
    """

    def __init__(
        self,
        model: SplitModel,
        tokenizer: ChatTokenizer,
        shapes: Shapes,
        counters: SamplingCounters | None = None,
    ) -> None:
        self._model, self._tokenizer, self._mesh = model, tokenizer, mesh_of(model.params)
        # Shapes that are not worth a program on these devices are left out.
        self._shapes = shapes.coarse(free_tokens(count_elements(model), self._mesh))
        self._devices = data_parallel_size(self._mesh)
        self._is_small = uses_one_core(model, self._mesh)
        self.counters = counters or SamplingCounters()
        # On several devices a conversation would have to stay on the device that keeps it.
        room = self._shapes.kept_contexts * self._shapes.longest if self._devices == 1 else 0
        self._contexts = ContextCache(model, room) if room else None
        self._calls = 0

    def start(self, jobs: Sequence[SamplingJob], width: int) -> Callable[[], JobSamples]:
        """Dispatches jobs, each of which must fit one of `shapes.prompt_lengths`, without waiting.

        Returns a function that waits and returns for every job, in order, its `width` rows.
        """
        kept = None if self._contexts is None else self._contexts.kept_tokens
        of_model = self._shapes, self._devices
        chunks = batch_jobs(jobs, width, *of_model, is_small=self._is_small, kept=kept)
        batches = (self._batch(jobs, chunk, width) for chunk in chunks)
        in_flight: deque[tuple[PromptBatch, Finish]] = deque()

        def advance() -> None:
            # A batch of several programs keeps its cache on the devices between them, so at most
            # one such batch is in flight.
            for batch in batches:
                concurrently = batch.is_one_program and self._is_small
                in_flight.append((batch, start(batch.start, concurrently=concurrently)))
                if not batch.is_one_program:
                    return

        advance()
        self._calls += 1

        def finish() -> JobSamples:
            self._calls -= 1
            results: dict[int, list[Row]] = {}
            with progress("sample", "prompt", len(jobs)) as bar:
                for chunk in chunks:
                    batch, finish_batch = in_flight.popleft()
                    parts = finish_batch()
                    if not batch.is_one_program:
                        advance()
                    prompts = _rows_of(parts, chunk, width)
                    for draws, rows in zip(chunk.prompts, prompts, strict=True):
                        # Rows of padding have no tokens.
                        self.counters.tokens += sum(len(row.ids) for row in rows)
                        results |= _by_job(draws, rows, width)
                    bar.update(len(results) - bar.done)
            if self._contexts is not None and not self._calls:
                self._contexts.index.release()
            return [results[i] for i in range(len(jobs))]

        return finish

    def _batch(self, jobs: Sequence[SamplingJob], chunk: Chunk, width: int) -> PromptBatch:
        # Any job of a draw stands for all of them.
        prompts = [[jobs[draw[0]] for draw in draws] for draws in chunk.prompts]
        firsts = [prompt[0] for prompt in prompts]
        # All jobs of a batch have the same grammar and stop strings, see `batch_jobs`.
        regex = firsts[0].action_regex
        automaton = self._tokenizer.automaton(regex) if regex else None
        matches: list[list[int]] | None = None
        rest = tokens = [np.array(job.ids, np.int32) for job in firsts]
        if self._contexts is not None and chunk.rest < chunk.length:
            matches = [self._contexts.index.match(ids) for ids in tokens]
            rest = [ids[PAGE * len(m) :] for ids, m in zip(tokens, matches, strict=True)]
        return PromptBatch(
            model=self._model,
            prompts=pad_prompts(
                prompts, chunk.size, width=width, copies=chunk.copies, automaton=automaton
            ),
            ids_BL=pad_ids(rest, chunk.size, chunk.rest),
            length=chunk.length,
            grammar=make_grammar(self._tokenizer, firsts[0], automaton, self._mesh),
            slots=self._shapes.cache_sizes_for(max(job.limit for job in firsts)),
            sizes=tuple(n // self._devices for n in self._shapes.global_batch_sizes(self._devices)),
            use_top_p=any(job.top_p < 1 for job in firsts),
            stride=CHECK_STRIDE if jax.default_backend() == "gpu" else 1,
            mesh=self._mesh,
            counters=self.counters,
            contexts=self._contexts,
            tokens=tokens,
            matches=matches,
        )


def sample_jobs(
    model: SplitModel,
    tokenizer: ChatTokenizer,
    jobs: Sequence[SamplingJob],
    width: int,
    shapes: Shapes,
) -> JobSamples:
    """Samples `width` continuations of every job and waits for them, see `JobSampler`."""
    return JobSampler(model, tokenizer, shapes).start(jobs, width)()


def _by_job(draws: Sequence[Draw], rows: Sequence[Row], width: int) -> dict[int, list[Row]]:
    parts = [[*rows[k : k + width]] for k in range(0, len(rows), width)]
    return {i: part for draw, part in zip(draws, parts, strict=False) for i in draw}


def _rows_of(parts: Sequence[PartialSamples], chunk: Chunk, width: int) -> JobSamples:
    # A prompt that continued in a smaller batch is in several parts; the last has all its tokens.
    last = {i: (samples, at) for numbers, samples in parts for at, i in enumerate(numbers.tolist())}

    def row(samples: Samples, b: int) -> Row:
        ids, logps, n = samples.ids_BT[b], samples.logps_BT[b], int(samples.count_B[b])
        removed = None if samples.removed_B is None else float(samples.removed_B[b]) / max(n, 1)
        return Row(tuple(ids[:n].tolist()), tuple(logps[:n].tolist()), removed)

    rows = chunk.copies * width
    places = (last[i] for i in range(len(chunk.prompts)))
    return [[row(samples, at * rows + k) for k in range(rows)] for samples, at in places]
