"""Actions of a policy: requests are padded to a few static shapes, sampled, and cut to size."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ragrl.runtime.sharding import mesh_of, share, ways
from jax_ragrl.sampling.batches import Batch, Finish, Part, segments
from jax_ragrl.sampling.decode import STRIDE, Grammar, Prompts, Sampled
from jax_ragrl.text.tokenizer import ChatTokenizer


class Job(NamedTuple):
    """One prompt: its ids (a forced prefix included), its seed, and how it is sampled.

    `tokens` is the regular expression of a grammar mask, `stops` are strings that end what is
    written, see `rollout.roles.Role`.
    """

    ids: tuple[int, ...]
    seed: int
    temperature: float
    top_p: float
    limit: int
    tokens: str = ""
    stops: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The static shapes that a run compiles: prompt lengths, batch sizes, new tokens.

    `batches` are sizes on one device: where `ways` devices share a batch, it has so many times as
    many prompts, or as few as one of these where there are no more. A device's part holds at most
    `tokens` prompt tokens, padding included, unless the batch is the smallest.

    A cache for `slots` new tokens doubles until it has the `steps` that some row may need, and a
    batch of which half or more has ended goes on in a smaller one. So for each prompt length and
    batch size there is one program where no row may need more than `slots`; for batches where some
    row may, one that begins, and at most one that goes on for each size of the cache: 2048 steps
    have 128, 256, 512, 1024 and 2048.
    """

    lengths: tuple[int, ...] = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    steps: int = 64
    tokens: int = 16384
    slots: int = 128

    def length(self, size: int) -> int | None:
        """The smallest prompt length that holds `size` tokens; None where none does."""
        return next((n for n in self.lengths if size <= n), None)

    def sizes(self, ways: int = 1) -> list[int]:
        """The batch sizes, ascending; each divides over the devices."""
        few = {-(-n // ways) * ways for n in self.batches}
        return sorted(few | {n * ways for n in self.batches})

    def most(self, length: int, ways: int = 1) -> int:
        """The largest batch of prompts of a padded length."""
        first, *sizes = self.sizes(ways)
        return max([first, *(n for n in sizes if n * length <= self.tokens * ways)])

    def batch(self, size: int, length: int, ways: int = 1) -> int:
        """The smallest batch that holds `size` prompts of a length, at most `most(length)`."""
        most = self.most(length, ways)
        return next((n for n in self.sizes(ways) if size <= n <= most), most)

    def caches(self, limit: int) -> tuple[int, ...]:
        """The sizes that a cache has, until it holds `limit` new tokens."""
        sizes = segments(self.steps, self.slots)
        return tuple(n for i, n in enumerate(sizes) if i == 0 or sizes[i - 1] < limit)


Written = list[list[tuple[tuple[int, ...], tuple[float, ...]]]]  # rows of every job


def sample_jobs(
    graph: Any,
    params: Any,
    tokenizer: ChatTokenizer,
    jobs: Sequence[Job],
    width: int,
    shapes: Shapes,
) -> Written:
    """`width` continuations (ids, log-probabilities) of every job, in the order of `jobs`.

    Every job's prompt must fit one of `shapes.lengths`. Prompts go where the parameters are: over a
    mesh, in batches that divide it.
    """
    return start_jobs(graph, params, tokenizer, jobs, width, shapes)()


def start_jobs(
    graph: Any,
    params: Any,
    tokenizer: ChatTokenizer,
    jobs: Sequence[Job],
    width: int,
    shapes: Shapes,
) -> Callable[[], Written]:
    """As `sample_jobs`, which the devices begin with; what is returned waits for them.

    Of batches that take several programs one is begun at a time: a batch that has begun leaves its
    cache on the devices.
    """
    parts = chunks(jobs, shapes, ways(mesh_of(params)))
    batches = (
        _batch((graph, params), tokenizer, [jobs[i] for i in chunk], length, width, shapes)
        for chunk, length in parts
    )
    begun: deque[tuple[Batch, Finish]] = deque()

    def advance() -> None:
        for batch in batches:
            begun.append((batch, batch.begin()))
            if not batch.one:
                return

    advance()

    def finish() -> Written:
        results: list[Any] = [None] * len(jobs)
        for chunk, _ in parts:
            batch, end = begun.popleft()
            ended = end()
            if not batch.one:
                advance()
            for at, rows in enumerate(_read(ended, len(chunk), width)):
                results[chunk[at]] = rows
        return results

    return finish


def _batch(
    net: tuple[Any, Any],
    tokenizer: ChatTokenizer,
    jobs: Sequence[Job],
    length: int,
    width: int,
    shapes: Shapes,
) -> Batch:
    mesh = mesh_of(net[1])
    count = shapes.batch(len(jobs), length, ways(mesh))
    stops = np.array(tokenizer.stop_ids, np.int32)
    grammar = stops, tokenizer.allowed(jobs[0].tokens), tokenizer.stops(jobs[0].stops)
    return Batch(
        net,
        pad_prompts(jobs, length, count),
        Grammar(*(None if x is None else share(x, mesh) for x in grammar)),
        width,
        shapes.caches(max(job.limit for job in jobs)),
        tuple(n // ways(mesh) for n in shapes.sizes(ways(mesh))),
        nucleus=any(job.top_p < 1 for job in jobs),
        stride=STRIDE if jax.default_backend() == "gpu" else 1,
        mesh=mesh,
    )


def chunks(jobs: Sequence[Job], shapes: Shapes, ways: int = 1) -> list[tuple[list[int], int]]:
    """Job numbers by padded length, grammar and stops, in batches of at most the largest size."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, job in enumerate(jobs):
        length = shapes.length(len(job.ids))
        if length is None:
            raise ValueError(f"a prompt of {len(job.ids)} tokens exceeds {shapes.lengths[-1]}")
        groups.setdefault((length, job.tokens, job.stops), []).append(i)
    return [
        (group[start : start + shapes.most(length, ways)], length)
        for (length, *_), group in sorted(groups.items())
        for start in range(0, len(group), shapes.most(length, ways))
    ]


def pad_prompts(jobs: Sequence[Job], length: int, batch: int) -> Prompts:
    """Jobs as host arrays `[batch, length]`; missing rows have length 0."""
    ids = np.zeros((batch, length), np.int32)
    for row, job in enumerate(jobs):
        ids[row, : len(job.ids)] = job.ids

    def column(values: Callable[[Job], Any], dtype: Any) -> np.ndarray:
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
    )


def _read(parts: Sequence[Part], count: int, width: int) -> Written:
    """The rows of the first `count` prompts: of each what it held when it was seen last."""
    last = {i: (sampled, at) for numbers, sampled in parts for at, i in enumerate(numbers.tolist())}

    def row(sampled: Sampled, b: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        ids, logps, n = (x[b] for x in sampled)
        return tuple(ids[:n].tolist()), tuple(logps[:n].tolist())

    held = (last[i] for i in range(count))
    return [[row(sampled, at * width + k) for k in range(width)] for sampled, at in held]
