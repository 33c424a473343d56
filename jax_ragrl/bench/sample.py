"""Measures sampling: continuations of prompts, of equal or unequal lengths.

Ids and weights are random, which does not change the cost. Only its limit ends a row, so the number
of tokens is known in advance. The result is the fastest of the repeated rollouts.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_ragrl.bench.train import Timing, peak_bytes, time_step
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.published import published_config
from jax_ragrl.sampling.sampler import SamplingJob, Shapes, sample_jobs
from jax_ragrl.sampling.weights import for_sampling

# A tokenizer without stop tokens and without forbidden tokens.
PLAIN_TOKENIZER: Any = types.SimpleNamespace(
    stop_ids=(), allowed_tokens=lambda _: None, stop_transitions=lambda _: None
)


@dataclasses.dataclass(frozen=True)
class SampleWork:
    """The measured work.

    Fields:
      shape: a published model, or `tiny`.
      prompts: number of prompts.
      siblings: continuations per prompt.
      prompt: tokens per prompt.
      new: max new tokens per continuation.
      mean: mean of the new tokens, exponentially distributed per prompt; 0 = all have `new`.
      batch: prompts sampled together.
      slots: initial cache size in new tokens. With `new` or more, the cache never grows and the
        batch never shrinks.
      dtype: dtype of weights and computation.
      repeats: number of timed rollouts.
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
        """The number of new tokens per prompt."""
        if not self.mean:
            return [self.new] * self.prompts
        # Real replies have a long tail of lengths, which leaves most of a batch idle at the end.
        lengths = np.random.default_rng(0).exponential(self.mean, self.prompts)
        return np.clip(lengths, 1, self.new).astype(int).tolist()

    def jobs(self, vocabulary: int) -> list[SamplingJob]:
        """Random prompts, sampled at temperature 1."""
        ids = np.random.default_rng(1).integers(0, vocabulary, (self.prompts, self.prompt))
        rows = zip(ids.tolist(), self.limits(), strict=True)
        return [
            SamplingJob(tuple(row), seed=i, temperature=1.0, top_p=1.0, limit=limit)
            for i, (row, limit) in enumerate(rows)
        ]

    def shapes(self) -> Shapes:
        """The batch, and the sizes that it may shrink to: repeatedly a quarter."""
        # Finished rows leave the batch when a smaller size is large enough for the others.
        sizes = [self.batch]
        while sizes[-1] > 1:
            sizes.append(-(-sizes[-1] // 4))
        tokens = self.batch * self.prompt
        return Shapes(
            prompt_lengths=(self.prompt,),
            batch_sizes=tuple(sorted(sizes)),
            max_new_tokens=self.new,
            max_prompt_tokens=tokens,
            initial_cache_size=self.slots,
        )


def bench_sample(work: SampleWork) -> dict[str, Any]:
    """Measures a rollout, and the first one, which compiles."""
    config = published_config(work.shape)
    # Weights in the dtype of computation, as in a sampler: another dtype would need a copy.
    config = dataclasses.replace(config, dtype=work.dtype, param_dtype=work.dtype)
    model = for_sampling({"policy": Decoder(config, rngs=nnx.Rngs(0))})["policy"]
    jobs, shapes = work.jobs(config.vocab_size), work.shapes()
    rollout = time_step(
        lambda: sample_jobs(model, PLAIN_TOKENIZER, jobs, work.siblings, shapes) and (),
        work.repeats,
    )
    tokens = sum(work.limits()) * work.siblings
    return {
        "device": jax.devices()[0].device_kind,
        **dataclasses.asdict(work),
        **sampling_speed(rollout, tokens),
        "first_s": round(rollout.first, 2),
        "peak_bytes": peak_bytes(),
    }


def sampling_speed(rollout: Timing, tokens: int) -> dict[str, Any]:
    """New tokens of a rollout, its seconds, and the rates per second and per CPU second."""
    return {
        "tokens": tokens,
        "rollout_s": round(rollout.seconds, 4),
        "rollout_cpu_s": round(rollout.cpu, 4),
        "tokens_per_s": round(tokens / rollout.seconds, 1),
        "tokens_per_cpu_s": round(tokens / rollout.cpu, 1),
    }
