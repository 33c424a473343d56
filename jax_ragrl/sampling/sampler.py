"""Samples actions of a policy: requests are padded to a few static shapes, sampled and trimmed."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.compile_ahead import Program
from jax_ragrl.runtime.free_work import count_elements, free_tokens
from jax_ragrl.runtime.progress import progress
from jax_ragrl.runtime.sharding import data_parallel_size, mesh_of
from jax_ragrl.runtime.small_programs import start, uses_one_core
from jax_ragrl.sampling.batches import Finish, PartialSamples, PromptBatch
from jax_ragrl.sampling.counters import SamplingCounters
from jax_ragrl.sampling.decode import Samples, check_stride
from jax_ragrl.sampling.engine import SizedJob, SlotEngine
from jax_ragrl.sampling.grouping import Chunk, Draw, batch_jobs, make_grammar, pad_prompts
from jax_ragrl.sampling.jobs import Row as Row
from jax_ragrl.sampling.jobs import SamplingJob as SamplingJob
from jax_ragrl.sampling.jobs import Shapes as Shapes
from jax_ragrl.text.tokenizer import ChatTokenizer

# For every job, its rows.
JobSamples = list[list[Row]]


class JobSampler:
    """Samples jobs of one model as its shapes say: in slots that are refilled, or in batches.

    Slots keep the contexts of a call for the next call.

    Args:
      model, tokenizer, shapes: as in `sample_jobs`.
      counters: counts the work.
    """

    def __init__(
        self,
        model: SplitModel,
        tokenizer: ChatTokenizer,
        shapes: Shapes,
        counters: SamplingCounters | None = None,
    ) -> None:
        self._of_model = model, tokenizer
        self._shapes, self.counters = shapes, counters or SamplingCounters()
        self._engine: SlotEngine | None = None

    def start(self, jobs: Sequence[SamplingJob], width: int) -> Callable[[], JobSamples]:
        """Dispatches jobs; the returned function waits for the result of `sample_jobs`.

        Slots do not start before that function is called.
        """
        if not self._shapes.decode_rows:
            return start_jobs(*self._of_model, jobs, width, self._shapes, self.counters)
        return functools.partial(self._slots().sample, jobs, width)

    def stream(
        self, jobs: Sequence[SizedJob], arrivals: Callable[[], Sequence[SizedJob]]
    ) -> Iterator[tuple[int, list[Row]]]:
        """Samples jobs and those that arrive meanwhile, in slots, see `SlotEngine.stream`."""
        return self._slots().stream(jobs, arrivals)

    def _slots(self) -> SlotEngine:
        if self._engine is None:
            self._engine = SlotEngine(*self._of_model, self._shapes, self.counters)
        return self._engine


def sample_jobs(
    model: SplitModel,
    tokenizer: ChatTokenizer,
    jobs: Sequence[SamplingJob],
    width: int,
    shapes: Shapes,
    counters: SamplingCounters | None = None,
) -> JobSamples:
    """Samples `width` continuations of every job and waits for them.

    A job gets the same tokens whatever the other jobs are; jobs with equal prompts are computed
    together, see `sampling.grouping`.

    Args:
      model: a split decoder. If its parameters are on a mesh, batches are split over this mesh.
      tokenizer: supplies the stop ids, and the masks of allowed tokens and stop strings.
      jobs: the prompts; each must fit one of `shapes.prompt_lengths`.
      width: siblings per job.
      shapes: the static shapes to pad to.
      counters: counts the work.

    Returns:
      For every job, in order, its `width` rows.
    """
    return JobSampler(model, tokenizer, shapes, counters).start(jobs, width)()


def start_jobs(
    model: SplitModel,
    tokenizer: ChatTokenizer,
    jobs: Sequence[SamplingJob],
    width: int,
    shapes: Shapes,
    counters: SamplingCounters | None = None,
) -> Callable[[], JobSamples]:
    """Dispatches the jobs to the devices, in batches, without waiting.

    Args:
      model, tokenizer, jobs, width, shapes, counters: as in `sample_jobs`.

    Returns:
      A function that waits and returns the result of `sample_jobs`.
    """
    work, shapes = counters or SamplingCounters(), _coarse(shapes, model)
    chunks = _chunks(model, jobs, width, shapes)
    batches = (_prompt_batch(model, tokenizer, jobs, c, width, shapes, work) for c in chunks)
    in_flight: deque[tuple[PromptBatch, Finish]] = deque()

    def advance() -> None:
        # A batch of several programs keeps its cache on the devices between them, so at most one
        # such batch is in flight.
        for batch in batches:
            in_flight.append((batch, _start(batch)))
            if not batch.is_one_program:
                return

    advance()

    def finish() -> JobSamples:
        results: dict[int, list[Row]] = {}
        with progress("sample", "prompt", len(jobs)) as bar:
            for chunk in chunks:
                batch, finish_batch = in_flight.popleft()
                parts = finish_batch()
                if not batch.is_one_program:
                    advance()
                for draws, rows in zip(chunk.prompts, _rows_of(parts, chunk, width), strict=True):
                    # Rows of padding have no tokens.
                    work.tokens += sum(len(row.ids) for row in rows)
                    results |= _by_job(draws, rows, width)
                bar.update(len(results) - bar.done)
        return [results[i] for i in range(len(jobs))]

    return finish


def _chunks(
    model: SplitModel, jobs: Sequence[SamplingJob], width: int, shapes: Shapes
) -> list[Chunk]:
    devices = data_parallel_size(mesh_of(model.params))
    return batch_jobs(jobs, width, shapes, devices, is_small=_is_small(model))


def _start(batch: PromptBatch) -> Finish:
    """Dispatches the first program of a batch."""
    return start(batch.start, concurrently=batch.is_one_program and _is_small(batch.model))


def sampler_programs(
    model: SplitModel,
    tokenizer: ChatTokenizer,
    jobs: Sequence[SamplingJob],
    widths: Sequence[int],
    shapes: Shapes,
    draws: int = 1,
) -> list[Program]:
    """Returns the programs that sample jobs in batches, the longest prompts first.

    Args:
      model, tokenizer, shapes: as in `sample_jobs`; there are no slots.
      jobs: jobs that stand for all others with the same grammar, limit and nucleus; their prompts
        are not read.
      widths: siblings per job.
      draws: how many jobs of a batch may have equal prompts.
    """
    devices, work = data_parallel_size(mesh_of(model.params)), SamplingCounters()
    shapes = _coarse(shapes, model)
    chunks = [
        Chunk([[(0,)]], length, size, copies)
        for length in reversed(shapes.prompt_lengths)
        for copies in shapes.copies_up_to(draws)
        for size in reversed(shapes.batch_sizes_for(length, devices, copies))
    ]
    return [
        program
        for chunk, width, job in itertools.product(chunks, widths, jobs)
        for program in _prompt_batch(
            model, tokenizer, [job._replace(ids=(0,))], chunk, width, shapes, work
        ).programs()
    ]


def _coarse(shapes: Shapes, model: SplitModel) -> Shapes:
    """Returns the shapes that are worth a program on the devices of the model."""
    return shapes.coarse(free_tokens(count_elements(model), mesh_of(model.params)))


def _is_small(model: SplitModel) -> bool:
    """Returns whether decoding with the model uses one core of a CPU."""
    return uses_one_core(model, mesh_of(model.params))


def _by_job(draws: Sequence[Draw], rows: Sequence[Row], width: int) -> dict[int, list[Row]]:
    """Returns the rows of each job of a prompt."""
    parts = [[*rows[k : k + width]] for k in range(0, len(rows), width)]
    return {i: part for draw, part in zip(draws, parts, strict=False) for i in draw}


def _prompt_batch(
    model: SplitModel,
    tokenizer: ChatTokenizer,
    jobs: Sequence[SamplingJob],
    chunk: Chunk,
    width: int,
    shapes: Shapes,
    counters: SamplingCounters,
) -> PromptBatch:
    mesh = mesh_of(model.params)
    devices = data_parallel_size(mesh)
    # Any job of a draw stands for all of them.
    prompts = [[jobs[draw[0]] for draw in draws] for draws in chunk.prompts]
    firsts = [prompt[0] for prompt in prompts]
    # All jobs of a batch have the same grammar and stop strings, see `batch_jobs`.
    regex = firsts[0].action_regex
    automaton = tokenizer.automaton(regex) if regex else None
    return PromptBatch(
        model=model,
        prompts=pad_prompts(
            prompts, chunk.length, chunk.size, width=width, copies=chunk.copies, automaton=automaton
        ),
        grammar=make_grammar(tokenizer, firsts[0], automaton, mesh),
        slots=shapes.cache_sizes_for(max(job.limit for job in firsts)),
        sizes=tuple(n // devices for n in shapes.global_batch_sizes(devices)),
        use_top_p=any(job.top_p < 1 for job in firsts),
        stride=check_stride(),
        mesh=mesh,
        counters=counters,
    )


def _rows_of(parts: Sequence[PartialSamples], chunk: Chunk, width: int) -> JobSamples:
    """Returns the rows of each prompt of a chunk.

    A prompt that continued in a smaller batch is in several parts; the last has all its tokens.
    """
    last = {i: (samples, at) for numbers, samples in parts for at, i in enumerate(numbers.tolist())}

    def row(samples: Samples, b: int) -> Row:
        ids, logps, n = samples.ids_BT[b], samples.logps_BT[b], int(samples.count_B[b])
        removed = None if samples.removed_B is None else float(samples.removed_B[b]) / max(n, 1)
        return Row(tuple(ids[:n].tolist()), tuple(logps[:n].tolist()), removed)

    rows = chunk.copies * width
    places = (last[i] for i in range(len(chunk.prompts)))
    return [[row(samples, at * rows + k) for k in range(rows)] for samples, at in places]
