"""Groups sampling jobs into batches: equal prompts become one prompt, and padding is kept small.

Jobs that differ in nothing but the seed share one prompt, which is prefilled once. Among all ways
to divide the prompts, in the order of their lengths, into batches of the static sizes, the cheapest
by this count of tokens per device, with padding, is taken:

  cost = sum over batches of  size * length + limit * max(rows, MIN_DECODE_ROWS)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jax_ragrl.runtime.sharding import replicate, target_platform
from jax_ragrl.sampling.decode import Grammar, Prompts
from jax_ragrl.sampling.jobs import JobGrammar, SamplingJob, Shapes
from jax_ragrl.text.automaton import FREE, UNPAYABLE, TokenAutomaton, follow
from jax_ragrl.text.tokenizer import ChatTokenizer

# A step with fewer rows is not faster, because it reads all weights: about the operations per
# second over the bytes per second of a device.
MIN_DECODE_ROWS_CPU, MIN_DECODE_ROWS_ACCELERATOR = 16, 256
MIN_DECODE_ROWS_SMALL = 2  # of a model whose weights stay in the cache of a core
# Tokens to run after kept ones: this number, doubled, up to half of a prompt.
SHORTEST_REST = 32

Draw = tuple[int, ...]  # numbers of the jobs that get the same rows


class Chunk(NamedTuple):
    """The prompts of one batch: the draws of each, one per seed.

    `length` is their padded length in tokens, `rest` that of the tokens that have to be run. `size`
    is the number of prompts and `copies` that of draws per prompt, a power of two, padding
    included.
    """

    prompts: list[list[Draw]]
    length: int
    size: int
    copies: int
    rest: int


def batch_jobs(
    jobs: Sequence[SamplingJob],
    width: int,
    shapes: Shapes,
    devices: int = 1,
    *,
    is_small: bool = False,
    kept: Callable[[Sequence[int]], int] | None = None,
) -> list[Chunk]:
    """Groups jobs that can share a batch: equal grammar and stop strings.

    Raises `ValueError` if a prompt exceeds the longest prompt length.

    Args:
      width: siblings per job.
      devices: the number of devices that share a batch.
      is_small: see `small_programs.uses_one_core`.
      kept: returns the first tokens of a prompt that are kept; None: no prompt has any.
    """
    rests = [0 if kept is None else _rest(job, kept(job.ids), shapes) for job in jobs]
    groups: dict[tuple[JobGrammar, int], list[int]] = {}
    for i, job in enumerate(jobs):
        groups.setdefault((job.grammar, rests[i]), []).append(i)
    on_cpu = target_platform() == "cpu"
    floor = MIN_DECODE_ROWS_CPU if on_cpu else MIN_DECODE_ROWS_ACCELERATOR
    floor = devices * (MIN_DECODE_ROWS_SMALL if is_small else floor)
    chunks: list[Chunk] = []
    for key in sorted(groups):
        limit = max(jobs[i].limit for i in groups[key])
        draws = draws_by_prompt(jobs, groups[key])
        prompts = [(_padded(jobs[prompt[0][0]], shapes), prompt) for prompt in draws]
        prompts.sort(key=lambda prompt: prompt[0])
        parts = _cheapest(prompts, limit, width, shapes, devices, floor)
        chunks += [chunk._replace(rest=key[1] or chunk.length) for chunk in parts]
    return chunks


def _padded(job: SamplingJob, shapes: Shapes) -> int:
    length = shapes.bucket_length(len(job.ids))
    if length is None:
        longest = shapes.prompt_lengths[-1]
        raise ValueError(f"a prompt of {len(job.ids)} tokens exceeds {longest}")
    return length


def _rest(job: SamplingJob, kept: int, shapes: Shapes) -> int:
    """Returns the padded number of tokens to run after kept ones; 0 to run the whole prompt."""
    lengths, rest = rest_lengths(_padded(job, shapes)), len(job.ids) - kept
    return next(n for n in lengths if n >= rest or not n) if kept else 0


def rest_lengths(length: int) -> list[int]:
    """Returns the padded numbers of tokens to run after kept ones, ascending, then 0.

    At most half of the padded `length` of the prompt is run, else all of it: kernels are faster.
    """
    powers = (SHORTEST_REST << i for i in itertools.count())
    return [*itertools.takewhile(lambda n: n <= length // 2, powers), 0]


def draws_by_prompt(jobs: Sequence[SamplingJob], numbers: Sequence[int]) -> list[list[Draw]]:
    """Returns the draws of each distinct prompt of some jobs, in the order of the jobs."""
    prompts: dict[SamplingJob, dict[int, list[int]]] = {}
    for i in numbers:
        # A greedy row does not depend on its seed.
        seed = jobs[i].seed if jobs[i].temperature else 0
        prompts.setdefault(jobs[i]._replace(seed=0), {}).setdefault(seed, []).append(i)
    return [[tuple(draw) for draw in draws.values()] for draws in prompts.values()]


def _cheapest(
    prompts: Sequence[tuple[int, list[Draw]]],
    limit: int,
    width: int,
    shapes: Shapes,
    devices: int,
    floor: int,
) -> list[Chunk]:
    """Returns the chunks of least cost; with equal cost, those with fewer copies per prompt.

    `prompts` are padded lengths, ascending, with the draws of each prompt; `floor` is the number of
    rows below which a decode step is not faster.
    """
    options = []
    for copies in shapes.copies_up_to(max(len(draws) for _, draws in prompts)):
        if not shapes.batch_sizes_for(prompts[-1][0], devices, copies):
            break
        parts = [(n, p[i : i + copies]) for n, p in prompts for i in range(0, len(p), copies)]
        lengths = [length for length, _ in parts]
        costs = {
            length: {
                size: size * length + limit * max(size * copies * width, floor)
                for size in shapes.batch_sizes_for(length, devices, copies)
            }
            for length in {*lengths}
        }
        cost, batches = divide(lengths, costs)
        chunks = [
            Chunk([draws for _, draws in parts[start:end]], lengths[end - 1], size, copies, 0)
            for start, end, size in batches
        ]
        options.append((cost, copies, chunks))
    return min(options)[2]


def divide(
    lengths: Sequence[int], costs: Mapping[int, Mapping[int, int]]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Divides prompts into the cheapest batches; only the first batch may have empty places.

    Args:
      lengths: the padded lengths of the prompts, ascending.
      costs: by padded length and possible size, the cost of a batch; a batch is as long as its
        longest prompt.

    Returns:
      The cost of all batches, and of each, in order, the first prompt, the end and the size.
    """
    # The cheapest batches of the first prompts: their cost, their number and the size of the last.
    best = [(0, 0, 0)]
    for end, length in enumerate(lengths, 1):
        before = ((best[max(0, end - size)], size, cost) for size, cost in costs[length].items())
        best.append(min((b[0] + cost, b[1] + 1, size) for b, size, cost in before))
    batches, end = [], len(lengths)
    while end:
        size = best[end][2]
        batches.append((max(0, end - size), end, size))
        end = batches[-1][0]
    return best[-1][0], batches[::-1]


def pad_prompts(
    prompts: Sequence[Sequence[SamplingJob]],
    batch: int,
    *,
    width: int = 1,
    copies: int = 1,
    automaton: TokenAutomaton | None = None,
) -> Prompts:
    """Returns the keys of rows and the parameters of prompts, in host arrays.

    Args:
      prompts: each is a sequence of at most `copies` jobs that differ in their seeds alone.
      batch: prompts, padding included.
      width: siblings per job.
      automaton: of the action regex of the jobs, on the host; None without one.
    """
    # The seed and the sibling number of each row; siblings are -1 on padding.
    seed_BC = np.zeros((batch, copies), np.uint32)
    sibling_BCW = np.full((batch, copies, width), -1, np.int32)
    for row, jobs in enumerate(prompts):
        seed_BC[row, : len(jobs)] = [job.seed for job in jobs]
        sibling_BCW[row, : len(jobs)] = np.arange(width)

    def column(values: Callable[[SamplingJob], Any], dtype: Any) -> np.ndarray:
        out = np.zeros(batch, dtype)
        out[: len(prompts)] = [values(jobs[0]) for jobs in prompts]
        return out

    return Prompts(
        length_B=column(lambda j: len(j.ids), np.int32),
        seed_BW=np.repeat(seed_BC, width, axis=1),
        sibling_BW=sibling_BCW.reshape(batch, -1),
        temperature_B=column(lambda j: j.temperature, np.float32),
        top_p_B=column(lambda j: j.top_p, np.float32),
        limit_B=column(lambda j: j.limit, np.int32),
        grammar_state_B=(
            None if automaton is None else column(lambda j: first_state(automaton, j), np.int32)
        ),
    )


def pad_ids(prompts: Sequence[Any], batch: int, length: int) -> np.ndarray:
    """Returns the tokens of prompts, padded on the right, int32 `[batch, length]`."""
    ids_BL = np.zeros((batch, length), np.int32)
    for row, ids in enumerate(prompts):
        ids_BL[row, : len(ids)] = ids
    return ids_BL


def first_state(automaton: TokenAutomaton, job: SamplingJob) -> int:
    """The state after the part of the action that the prompt ends with.

    It is `FREE` if that part violates the grammar, or if too few tokens are left to finish it.
    """
    prefix = job.ids[len(job.ids) - job.prefix_length :]
    state = follow(automaton, prefix, [UNPAYABLE - 1] * len(prefix))[-1]
    return state if automaton.tokens_left(state) <= job.limit else FREE


def make_grammar(
    tokenizer: ChatTokenizer, job: SamplingJob, automaton: TokenAutomaton | None, mesh: Mesh | None
) -> Grammar:
    """Returns the grammar of the jobs of a batch, of which any is given, on the devices."""
    allowed_V = tokenizer.allowed_tokens(job.allowed_token_regex)
    stop_SV = tokenizer.stop_transitions(job.stop_strings)
    return Grammar(
        stop_ids_S=replicate(np.array(tokenizer.stop_ids, np.int32), mesh),
        allowed_V=None if allowed_V is None else replicate(allowed_V, mesh),
        stop_SV=None if stop_SV is None else replicate(stop_SV, mesh),
        automaton=None if automaton is None else replicate(automaton, mesh),
    )
