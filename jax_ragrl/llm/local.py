"""A frozen Flax model in this process as the frozen language model."""

from __future__ import annotations

from collections.abc import Sequence

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import MeteredReply, seed_of
from jax_ragrl.models.split import SplitModel
from jax_ragrl.sampling.sampler import SamplingJob, Shapes, sample_jobs
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest


class LocalLLM:
    """A decoder and its tokenizer with the interface of `FrozenLLM`.

    A prompt longer than the longest static shape fails with an `EffectError`. `thinking` says
    whether replies may begin with a think block, see `ChatTokenizer.chat`.
    """

    on_device = True

    def __init__(
        self,
        model: SplitModel,
        tokenizer: ChatTokenizer,
        shapes: Shapes,
        name: str = "local",
        *,
        thinking: bool = False,
    ) -> None:
        self._model, self._tokenizer, self._shapes = model, tokenizer, shapes
        self.name, self._thinking = name, thinking

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """Returns one reply per request, sampled with the settings of the request."""
        # Fills the tokenizer's cache on all cores; `chat` below then only concatenates ids.
        self._tokenizer.encode_ahead(m.content for request in requests for m in request.messages)
        prompts = [
            tuple(self._tokenizer.chat(request.messages, thinking=self._thinking))
            for request in requests
        ]
        fit = [
            i for i, ids in enumerate(prompts) if self._shapes.bucket_length(len(ids)) is not None
        ]
        jobs = [self._job(requests[i], prompts[i]) for i in fit]
        # Rollouts of one question often send equal greedy requests, which need one sample.
        distinct = list(dict.fromkeys(jobs))
        rows = sample_jobs(self._model, self._tokenizer, distinct, 1, self._shapes)
        samples = dict(zip(distinct, rows, strict=True))
        longest = self._shapes.prompt_lengths[-1]
        replies: list[str | EffectError] = [
            EffectError(f"a prompt of {len(ids)} tokens is longer than {longest}")
            for ids in prompts
        ]
        for i, job in zip(fit, jobs, strict=True):
            ids = samples[job][0][0]
            # A block that the prompt opens is part of the reply, so that its end can be found.
            text = self._tokenizer.opened_thought(prompts[i]) + self._tokenizer.decode(ids)
            replies[i] = MeteredReply(text, len(prompts[i]), len(ids))
        return replies

    def _job(self, request: LLMRequest, ids: tuple[int, ...]) -> SamplingJob:
        sampling = request.sampling
        # Arrays for new tokens have a static size, which no request can exceed.
        limit = min(sampling.max_tokens, self._shapes.max_new_tokens)
        # The sampler's seeds are 32-bit; requests may have longer ones.
        seed = seed_of(request.seed, sampling.temperature) % 2**32
        return SamplingJob(ids, seed, sampling.temperature, sampling.top_p, limit)
