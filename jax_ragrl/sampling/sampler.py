"""Samples actions of a policy: requests are padded to a few static shapes, sampled and trimmed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.sharding import data_parallel_size, mesh_of, replicate
from jax_ragrl.sampling.batches import Finish, PartialSamples, PromptBatch
from jax_ragrl.sampling.decode import CHECK_STRIDE, Grammar, Samples
from jax_ragrl.sampling.grouping import Chunk, batch_jobs, pad_prompts
from jax_ragrl.sampling.jobs import Row as Row
from jax_ragrl.sampling.jobs import SamplingJob as SamplingJob
from jax_ragrl.sampling.jobs import Shapes as Shapes
from jax_ragrl.text.automaton import TokenAutomaton
from jax_ragrl.text.tokenizer import ChatTokenizer

# For every job, its rows.
JobSamples = list[list[Row]]


def sample_jobs(
    model: SplitModel,
    tokenizer: ChatTokenizer,
    jobs: Sequence[SamplingJob],
    width: int,
    shapes: Shapes,
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

    Returns:
      For every job, in order, its `width` rows.
    """
    return start_jobs(model, tokenizer, jobs, width, shapes)()


def start_jobs(
    model: SplitModel,
    tokenizer: ChatTokenizer,
    jobs: Sequence[SamplingJob],
    width: int,
    shapes: Shapes,
) -> Callable[[], JobSamples]:
    """Dispatches the jobs to the devices without waiting.

    Args:
      model, tokenizer, jobs, width, shapes: as in `sample_jobs`.

    Returns:
      A function that waits and returns the result of `sample_jobs`.
    """
    chunks = batch_jobs(jobs, width, shapes, data_parallel_size(mesh_of(model.params)))
    batches = (_prompt_batch(model, tokenizer, jobs, chunk, width, shapes) for chunk in chunks)
    in_flight: deque[tuple[PromptBatch, Finish]] = deque()

    def advance() -> None:
        # A batch of several programs keeps its cache on the devices between them, so at most one
        # such batch is in flight.
        for batch in batches:
            in_flight.append((batch, batch.start()))
            if not batch.is_one_program:
                return

    advance()

    def finish() -> JobSamples:
        results: list[Any] = [None] * len(jobs)
        for chunk in chunks:
            batch, finish_batch = in_flight.popleft()
            parts = finish_batch()
            if not batch.is_one_program:
                advance()
            for draws, rows in zip(chunk.prompts, _rows_of(parts, chunk, width), strict=True):
                for k, draw in enumerate(draws):
                    for i in draw:
                        results[i] = rows[k * width : (k + 1) * width]
        return results

    return finish


def _prompt_batch(
    model: SplitModel,
    tokenizer: ChatTokenizer,
    jobs: Sequence[SamplingJob],
    chunk: Chunk,
    width: int,
    shapes: Shapes,
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
        grammar=_grammar(tokenizer, firsts[0], automaton, mesh),
        slots=shapes.cache_sizes_for(max(job.limit for job in firsts)),
        sizes=tuple(n // devices for n in shapes.global_batch_sizes(devices)),
        use_top_p=any(job.top_p < 1 for job in firsts),
        # A check for early stopping makes the host wait on a GPU only.
        stride=CHECK_STRIDE if jax.default_backend() == "gpu" else 1,
        mesh=mesh,
    )


def _grammar(
    tokenizer: ChatTokenizer, job: SamplingJob, automaton: TokenAutomaton | None, mesh: Mesh | None
) -> Grammar:
    """Returns the grammar of a job on the devices.

    Args:
      tokenizer: supplies masks and stop ids.
      job: any job of the batch.
      automaton: of its action regex, on the host.
      mesh: the devices.
    """
    allowed_V = tokenizer.allowed_tokens(job.allowed_token_regex)
    stop_SV = tokenizer.stop_transitions(job.stop_strings)
    return Grammar(
        stop_ids_S=replicate(np.array(tokenizer.stop_ids, np.int32), mesh),
        allowed_V=None if allowed_V is None else replicate(allowed_V, mesh),
        stop_SV=None if stop_SV is None else replicate(stop_SV, mesh),
        automaton=None if automaton is None else replicate(automaton, mesh),
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
