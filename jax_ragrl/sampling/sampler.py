"""Actions of a policy: requests are padded to a few static shapes, sampled, and cut to size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jax_ragrl.sampling.decode import Prompts, Sampled, generate
from jax_ragrl.sharding import fetch, mesh_of, on, place, share, ways
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
    """

    lengths: tuple[int, ...] = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
    batches: tuple[int, ...] = (1, 4, 16, 64)
    steps: int = 64
    tokens: int = 16384

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
    """As `sample_jobs`, which the devices begin with; what is returned waits for them."""
    mesh = mesh_of(params)
    stride = 16 if jax.default_backend() == "gpu" else 1
    stops = share(np.array(tokenizer.stop_ids, np.int32), mesh)
    pending = []
    for chunk, length in chunks(jobs, shapes, ways(mesh)):
        batch = shapes.batch(len(chunk), length, ways(mesh))
        prompts = place(pad_prompts([jobs[i] for i in chunk], length, batch), mesh)
        grammar = tokenizer.allowed(jobs[chunk[0]].tokens), tokenizer.stops(jobs[chunk[0]].stops)
        given = (prompts, stops, *(None if x is None else share(x, mesh) for x in grammar))
        fixed = {"nucleus": any(jobs[i].top_p < 1 for i in chunk), "stride": stride}
        with on(mesh):
            sampled = generate(graph, params, *given, width=width, steps=shapes.steps, **fixed)
        pending.append((chunk, sampled))

    def finish() -> Written:
        results: list[Any] = [None] * len(jobs)
        for chunk, sampled in pending:
            rows = _rows(fetch(sampled))
            for at, i in enumerate(chunk):
                results[i] = rows[at * width : (at + 1) * width]
        return results

    return finish


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


def _rows(sampled: Sampled) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return [
        (tuple(ids[:n].tolist()), tuple(logps[:n].tolist()))
        for ids, logps, n in zip(*sampled, strict=True)
    ]
