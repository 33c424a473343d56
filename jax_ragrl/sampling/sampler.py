"""Samples actions of a policy: requests are padded to a few static shapes, sampled and trimmed."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ragrl.models.split import SplitModel
from jax_ragrl.runtime.sharding import data_parallel_size, mesh_of, replicate
from jax_ragrl.sampling.batches import Finish, PartialSamples, PromptBatch, cache_sizes
from jax_ragrl.sampling.decode import CHECK_STRIDE, Grammar, Prompts, Samples
from jax_ragrl.text.automaton import FREE, UNPAYABLE, TokenAutomaton, follow
from jax_ragrl.text.tokenizer import ChatTokenizer

PROMPT_LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


class SamplingJob(NamedTuple):
    """One prompt and its sampling parameters.

    Fields:
      ids: the token ids of the prompt, a forced prefix of the action included.
      seed: the seed of the sampling keys, below 2**32.
      temperature: 0 is greedy.
      top_p: nucleus size; 1 switches the filter off.
      limit: maximum of new tokens.
      allowed_token_regex: only tokens whose text matches, and stop tokens, are allowed; "" allows
        all.
      stop_strings: a row ends at the first token whose text completes one of these strings.
      action_regex: if not empty, the whole action matches this regular expression, and
        `allowed_token_regex` is not used.
      prefix_length: the number of last ids of the prompt that begin the action.
    """

    ids: tuple[int, ...]
    seed: int
    temperature: float
    top_p: float
    limit: int
    allowed_token_regex: str = ""
    stop_strings: tuple[str, ...] = ()
    action_regex: str = ""
    prefix_length: int = 0


class Row(NamedTuple):
    """One sampled action.

    Fields:
      ids: token ids.
      logps: their log-probabilities.
      removed: the probability that the mask of a strict grammar removed per token, the mean over
        the tokens; None without a strict grammar.
    """

    ids: tuple[int, ...]
    logps: tuple[float, ...]
    removed: float | None = None


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static shapes of sampling: one program is compiled per shape.

    For each prompt length and batch size there is one program if no row may need more than
    `initial_cache_size` tokens. Otherwise there is one program that starts, and at most one that
    continues for each size of the cache: 2048 new tokens have the sizes 128, 256, 512, 1024, 2048.

    Fields:
      prompt_lengths: bucket sizes of prompts in tokens, ascending.
      batch_sizes: bucket sizes of batches in prompts per device, ascending. If several devices
        share a batch, a batch of one bucket size in total is possible too, for few prompts.
      max_new_tokens: maximum of new tokens of any row.
      max_prompt_tokens: maximum of prompt tokens per device, padding included; the smallest batch
        is exempt.
      initial_cache_size: new tokens that a cache holds at first; it doubles up to
        `max_new_tokens`. A batch of which half or more is done continues in a smaller one.
    """

    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64)
    max_new_tokens: int = 64
    max_prompt_tokens: int = 16384
    initial_cache_size: int = 128

    def bucket_length(self, tokens: int) -> int | None:
        """Returns the smallest prompt length that holds `tokens`; None if none does."""
        return next((n for n in self.prompt_lengths if tokens <= n), None)

    def global_batch_sizes(self, devices: int = 1) -> list[int]:
        """Returns the batch sizes over all devices, ascending; each divides over the devices."""
        # For few prompts: a batch of a bucket size in total, rounded up to the devices.
        small = {-(-n // devices) * devices for n in self.batch_sizes}
        return sorted(small | {n * devices for n in self.batch_sizes})

    def max_batch_size(self, length: int, devices: int = 1) -> int:
        """Returns the largest batch of prompts of a padded length, over all devices."""
        first, *sizes = self.global_batch_sizes(devices)
        limit = self.max_prompt_tokens * devices
        return max([first, *(n for n in sizes if n * length <= limit)])

    def bucket_batch_size(self, prompts: int, length: int, devices: int = 1) -> int:
        """Returns the smallest batch that holds a number of prompts, or the largest one.

        Args:
          prompts: the number of prompts to sample.
          length: their padded length in tokens.
          devices: the number of devices that share the batch.
        """
        largest = self.max_batch_size(length, devices)
        sizes = self.global_batch_sizes(devices)
        return next((n for n in sizes if prompts <= n <= largest), largest)

    def cache_sizes_for(self, limit: int) -> tuple[int, ...]:
        """Returns the sizes that a cache takes until it holds `limit` new tokens."""
        sizes = cache_sizes(self.max_new_tokens, self.initial_cache_size)
        return tuple(n for i, n in enumerate(sizes) if i == 0 or sizes[i - 1] < limit)


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
    chunks = batch_jobs(jobs, shapes, data_parallel_size(mesh_of(model.params)))
    batches = (
        _prompt_batch(model, tokenizer, [jobs[i] for i in chunk], length, width, shapes)
        for chunk, length in chunks
    )
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
        for chunk, _ in chunks:
            batch, finish_batch = in_flight.popleft()
            parts = finish_batch()
            if not batch.is_one_program:
                advance()
            for i, rows in zip(chunk, _rows_of(parts, len(chunk), width), strict=True):
                results[i] = rows
        return results

    return finish


def _prompt_batch(
    model: SplitModel,
    tokenizer: ChatTokenizer,
    jobs: Sequence[SamplingJob],
    length: int,
    width: int,
    shapes: Shapes,
) -> PromptBatch:
    mesh = mesh_of(model.params)
    devices = data_parallel_size(mesh)
    # All jobs of a batch have the same grammar and stop strings, see `batch_jobs`.
    allowed_V = tokenizer.allowed_tokens(jobs[0].allowed_token_regex)
    stop_SV = tokenizer.stop_transitions(jobs[0].stop_strings)
    regex = jobs[0].action_regex
    automaton = tokenizer.automaton(regex) if regex else None
    size = shapes.bucket_batch_size(len(jobs), length, devices)
    return PromptBatch(
        model=model,
        prompts=pad_prompts(jobs, length, size, automaton),
        grammar=Grammar(
            stop_ids_S=replicate(np.array(tokenizer.stop_ids, np.int32), mesh),
            allowed_V=None if allowed_V is None else replicate(allowed_V, mesh),
            stop_SV=None if stop_SV is None else replicate(stop_SV, mesh),
            automaton=None if automaton is None else replicate(automaton, mesh),
        ),
        width=width,
        slots=shapes.cache_sizes_for(max(job.limit for job in jobs)),
        sizes=tuple(n // devices for n in shapes.global_batch_sizes(devices)),
        use_top_p=any(job.top_p < 1 for job in jobs),
        # A check for early stopping makes the host wait on a GPU only.
        stride=CHECK_STRIDE if jax.default_backend() == "gpu" else 1,
        mesh=mesh,
    )


def batch_jobs(
    jobs: Sequence[SamplingJob], shapes: Shapes, devices: int = 1
) -> list[tuple[list[int], int]]:
    """Groups jobs that can share a batch: equal padded length, grammar and stop strings.

    Args:
      jobs: the jobs to group.
      shapes: the static shapes to pad to.
      devices: the number of devices that share a batch.

    Returns:
      Pairs of job numbers, at most `shapes.max_batch_size` of them, and their padded length.

    Raises:
      ValueError: a prompt exceeds the longest prompt length.
    """
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, job in enumerate(jobs):
        length = shapes.bucket_length(len(job.ids))
        if length is None:
            longest = shapes.prompt_lengths[-1]
            raise ValueError(f"a prompt of {len(job.ids)} tokens exceeds {longest}")
        key = (length, job.allowed_token_regex, job.stop_strings, job.action_regex)
        groups.setdefault(key, []).append(i)
    return [
        (group[start : start + shapes.max_batch_size(length, devices)], length)
        for (length, *_), group in sorted(groups.items())
        for start in range(0, len(group), shapes.max_batch_size(length, devices))
    ]


def pad_prompts(
    jobs: Sequence[SamplingJob], length: int, batch: int, automaton: TokenAutomaton | None = None
) -> Prompts:
    """Pads jobs to host arrays.

    Args:
      jobs: at most `batch` jobs of at most `length` prompt tokens.
      length: columns of `ids_BP`.
      batch: rows; those beyond the jobs have length 0, and `FREE` as state of the automaton.
      automaton: of the action regex of the jobs, on the host; None without one.
    """
    ids = np.zeros((batch, length), np.int32)
    for row, job in enumerate(jobs):
        ids[row, : len(job.ids)] = job.ids

    def column(values: Callable[[SamplingJob], Any], dtype: Any) -> np.ndarray:
        out = np.zeros(batch, dtype)
        out[: len(jobs)] = [values(job) for job in jobs]
        return out

    return Prompts(
        ids_BP=ids,
        length_B=column(lambda j: len(j.ids), np.int32),
        seed_B=column(lambda j: j.seed, np.uint32),
        temperature_B=column(lambda j: j.temperature, np.float32),
        top_p_B=column(lambda j: j.top_p, np.float32),
        limit_B=column(lambda j: j.limit, np.int32),
        grammar_state_B=(
            None if automaton is None else column(lambda j: _first_state(automaton, j), np.int32)
        ),
    )


def _first_state(automaton: TokenAutomaton, job: SamplingJob) -> int:
    """The state after the part of the action that the prompt ends with.

    It is `FREE` if that part violates the grammar, or if too few tokens are left to finish it.
    """
    prefix = job.ids[len(job.ids) - job.prefix_length :]
    state = follow(automaton, prefix, [UNPAYABLE - 1] * len(prefix))[-1]
    return state if automaton.tokens_left(state) <= job.limit else FREE


def _rows_of(parts: Sequence[PartialSamples], count: int, width: int) -> JobSamples:
    """Returns the rows of the first `count` prompts.

    A prompt that continued in a smaller batch is in several parts; the last has all its tokens.
    """
    last = {i: (samples, at) for numbers, samples in parts for at, i in enumerate(numbers.tolist())}

    def row(samples: Samples, b: int) -> Row:
        ids, logps, n = samples.ids_BT[b], samples.logps_BT[b], samples.count_B[b]
        removed = None if samples.removed_B is None else float(samples.removed_B[b]) / max(n, 1)
        return Row(tuple(ids[:n].tolist()), tuple(logps[:n].tolist()), removed)

    places = (last[i] for i in range(count))
    return [[row(samples, at * width + k) for k in range(width)] for samples, at in places]
