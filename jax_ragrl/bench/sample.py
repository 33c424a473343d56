"""What sampling costs: continuations of prompts, as long as each other or not.

Ids and weights are random, which changes no cost, and nothing but its limit ends a row: what is
written is known beforehand. Of repeated rollouts the fastest counts.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_ragrl.bench.train import peak_bytes, timed
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.published import shape
from jax_ragrl.sampling.sampler import Job, Shapes, sample_jobs
from jax_ragrl.sampling.weights import for_sampling

# A tokenizer that ends no row, and forbids nothing.
FREE: Any = types.SimpleNamespace(stop_ids=(), allowed=lambda _: None, stops=lambda _: None)


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What is measured: `siblings` continuations of each of `prompts` prompts of `prompt` tokens.

    They have `new` tokens, or, with a `mean`, exponentially many of this mean and `new` at most;
    siblings have as many. `batch` prompts are sampled at once, with a cache of `slots` new tokens
    to begin with: with `new` slots or more it never grows, and rows that are done stay.
    """

    shape: str = "qwen2.5-0.5b"
    prompts: int = 64
    siblings: int = 8
    prompt: int = 512
    new: int = 1024
    mean: int = 0
    batch: int = 64
    slots: int = 128
    dtype: str = "bfloat16"
    repeats: int = 3

    def limits(self) -> list[int]:
        """New tokens of the rows of each prompt."""
        if not self.mean:
            return [self.new] * self.prompts
        drawn = np.random.default_rng(0).exponential(self.mean, self.prompts)
        return np.clip(drawn, 1, self.new).astype(int).tolist()

    def jobs(self, vocabulary: int) -> list[Job]:
        """Random prompts, at temperature 1."""
        ids = np.random.default_rng(1).integers(0, vocabulary, (self.prompts, self.prompt))
        rows = zip(ids.tolist(), self.limits(), strict=True)
        return [Job(tuple(row), i, 1.0, 1.0, limit) for i, (row, limit) in enumerate(rows)]

    def shapes(self) -> Shapes:
        """The batch, and those that it may shrink to: a quarter, a quarter of this, and so on."""
        sizes = [self.batch]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 4))
        tokens = self.batch * self.prompt
        return Shapes((self.prompt,), tuple(sorted(sizes)), self.new, tokens, self.slots)


def bench_sample(work: Rollout) -> dict[str, Any]:
    """Seconds of a rollout and of the first one, which compiles; tokens written, and a second."""
    config = dataclasses.replace(shape(work.shape), dtype=work.dtype, param_dtype=work.dtype)
    net = for_sampling({"policy": Decoder(config, rngs=nnx.Rngs(0))})["policy"]
    jobs, shapes = work.jobs(config.vocab_size), work.shapes()
    rollout_s, first_s = timed(
        lambda: sample_jobs(*net, FREE, jobs, work.siblings, shapes) and (), work.repeats
    )
    tokens = sum(work.limits()) * work.siblings
    return {
        "device": jax.devices()[0].device_kind,
        **dataclasses.asdict(work),
        "tokens": tokens,
        "rollout_s": round(rollout_s, 4),
        "first_s": round(first_s, 2),
        "tokens_per_s": round(tokens / rollout_s, 1),
        "peak_bytes": peak_bytes(),
    }
