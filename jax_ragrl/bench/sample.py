"""Measures sampling: continuations of prompts, of equal or unequal lengths, in one or more turns.

Ids and weights are random, which does not change the cost. Only its limit ends a row, so the number
of tokens is known in advance. The result is the fastest of the repeated rollouts.

With several turns a prompt is a conversation: the first continuation and an observation are
appended to it, and the next turn begins.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import numpy as np
from flax import nnx

from jax_ragrl.bench.train import Timing, peak_bytes, time_step
from jax_ragrl.errors import UserError
from jax_ragrl.models.decoder import Decoder
from jax_ragrl.models.published import published_config
from jax_ragrl.models.split import SplitModel
from jax_ragrl.sampling.sampler import JobSampler, SamplingJob, Shapes
from jax_ragrl.sampling.weights import for_sampling

# A tokenizer without stop tokens and without forbidden tokens.
PLAIN_TOKENIZER: Any = types.SimpleNamespace(
    stop_ids=(), allowed_tokens=lambda _: None, stop_transitions=lambda _: None
)


@dataclasses.dataclass(frozen=True)
class SampleWork:
    """The measured work, described by the options of `ragrl bench sample`."""

    shape: str = "qwen2.5-0.5b"
    prompts: int = 64
    siblings: int = 8
    prompt: int = 512
    new: int = 1024
    mean: int = 0
    batch: int = 64
    turns: int = 1
    observation: int = 256
    kept_contexts: int = 0
    dtype: str = "bfloat16"
    attention: str = "auto"
    repeats: int = 3

    def __post_init__(self) -> None:
        if self.mean and self.turns > 1:
            raise UserError(
                f"--mean {self.mean} with --turns {self.turns}: turns have equal lengths: leave "
                "one of the two options out"
            )

    @property
    def tokens(self) -> int:
        """The new tokens of a rollout."""
        return sum(self.limits()) * self.siblings * self.turns

    def lengths(self) -> list[int]:
        """The tokens of a prompt at each turn."""
        return [self.prompt + turn * (self.new + self.observation) for turn in range(self.turns)]

    def observations(self, vocabulary: int) -> list[list[list[int]]]:
        """Random observations by the turn that they follow, one per prompt."""
        shape = (self.turns - 1, self.prompts, self.observation)
        return np.random.default_rng(2).integers(0, vocabulary, shape).tolist()  # type: ignore[no-any-return]

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
        lengths = self.lengths()
        return Shapes(
            prompt_lengths=tuple(lengths),
            batch_sizes=tuple(sorted(sizes)),
            max_new_tokens=self.new,
            max_prompt_tokens=self.batch * lengths[-1],
            kept_contexts=self.kept_contexts,
        )


def bench_sample(work: SampleWork) -> dict[str, Any]:
    """Measures a rollout, and the first one, which compiles."""
    config = published_config(work.shape)
    # Weights in the dtype of computation, as in a sampler: another dtype would need a copy.
    config = dataclasses.replace(
        config, dtype=work.dtype, param_dtype=work.dtype, attention_impl=work.attention
    )
    model = for_sampling({"policy": Decoder(config, rngs=nnx.Rngs(0))})["policy"]
    rollout = time_step(lambda: roll_out(work, model, config.vocab_size) and (), work.repeats)
    return {
        "device": jax.devices()[0].device_kind,
        **dataclasses.asdict(work),
        **sampling_speed(rollout, work.tokens),
        "first_s": round(rollout.first, 2),
        "peak_bytes": peak_bytes(),
    }


def roll_out(work: SampleWork, model: SplitModel, vocabulary: int) -> list[SamplingJob]:
    """Samples all turns and returns the conversations at the last one."""
    sampler, jobs = JobSampler(model, PLAIN_TOKENIZER, work.shapes()), work.jobs(vocabulary)
    for observations in work.observations(vocabulary):
        rows = sampler.start(jobs, work.siblings)()
        jobs = [
            job._replace(ids=(*job.ids, *row[0].ids, *observation), seed=job.seed + 1)
            for job, row, observation in zip(jobs, rows, observations, strict=True)
        ]
    sampler.start(jobs, work.siblings)()
    return jobs


def sampling_speed(rollout: Timing, tokens: int) -> dict[str, Any]:
    """New tokens of a rollout, its seconds, and the rates per second and per CPU second."""
    return {
        "tokens": tokens,
        "rollout_s": round(rollout.seconds, 4),
        "rollout_cpu_s": round(rollout.cpu, 4),
        "tokens_per_s": round(tokens / rollout.seconds, 1),
        "tokens_per_cpu_s": round(tokens / rollout.cpu, 1),
    }
