"""A frozen Flax model in this process as the language model of the environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.sampling.sampler import Job, Shapes, sample_jobs
from jax_ragrl.text.tokenizer import ChatTokenizer
from jax_ragrl.types import LLMRequest


class LocalLLM:
    """A split decoder and its tokenizer behind the interface of any language model.

    A prompt longer than the longest static shape gets an `EffectError` for a reply.
    """

    on_device = True

    def __init__(
        self, graph: Any, params: Any, tokenizer: ChatTokenizer, shapes: Shapes, name: str = "local"
    ) -> None:
        self._graph, self._params, self._tokenizer, self._shapes = graph, params, tokenizer, shapes
        self.name = name

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """One reply a request, sampled as the request says."""
        self._tokenizer.foresee(m.content for request in requests for m in request.messages)
        prompts = [tuple(self._tokenizer.chat(request.messages)) for request in requests]
        fit = [i for i, ids in enumerate(prompts) if self._shapes.length(len(ids)) is not None]
        jobs = [self._job(requests[i], prompts[i]) for i in fit]
        drawn = sample_jobs(self._graph, self._params, self._tokenizer, jobs, 1, self._shapes)
        longest = self._shapes.lengths[-1]
        replies: list[str | EffectError] = [
            EffectError(f"a prompt of {len(ids)} tokens is longer than {longest}")
            for ids in prompts
        ]
        for i, rows in zip(fit, drawn, strict=True):
            text, written = self._tokenizer.decode(rows[0][0]), len(rows[0][0])
            replies[i] = MeteredReply(text, len(prompts[i]), written)
        return replies

    def _job(self, request: LLMRequest, ids: tuple[int, ...]) -> Job:
        sampling = request.sampling
        limit = min(sampling.max_tokens, self._shapes.steps)
        return Job(ids, request.seed % 2**32, sampling.temperature, sampling.top_p, limit)
