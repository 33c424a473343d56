"""Any OpenAI-compatible server as the frozen language model: concurrent, retried, counted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import openai

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.types import LLMRequest


class OpenAILLM:
    """A chat model behind `base_url`; the key comes from `OPENAI_API_KEY`, where one is needed.

    Args:
      model: the server's name of the model.
      base_url: e.g. `http://localhost:8000/v1`; None for the service's own.
      concurrency: requests in flight at once.
      retries: tries after the first, with exponential back-off, on time-outs, 429 and 5xx; a
        server that says when to come back (up to a minute) is taken at its word.
      timeout: seconds to wait for a reply.

    Raises:
      UserError: no request could be made: no key for the service, or numbers that allow none.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        *,
        concurrency: int = 32,
        retries: int = 5,
        timeout: float = 60.0,
    ) -> None:
        if concurrency < 1 or retries < 0 or timeout <= 0:
            raise UserError(
                f"{model}: concurrency {concurrency}, retries {retries} and timeout {timeout} "
                "allow no request: give at least 1, 0 and some seconds"
            )
        self.name = model
        # A server of one's own asks for no key, but the client wants one.
        key = os.environ.get("OPENAI_API_KEY") or ("none" if base_url else None)
        if key is None:
            raise UserError(f"{model} needs a key: set OPENAI_API_KEY, or give a server's address")
        self._options: dict[str, Any] = {
            "api_key": key,
            "base_url": base_url,
            "max_retries": retries,
            "timeout": timeout,
        }
        self._concurrency = concurrency

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """One reply a request, in order; an `EffectError` after the last retry."""
        return asyncio.run(self._all(requests))

    async def _all(self, requests: Sequence[LLMRequest]) -> list[str | EffectError]:
        gate = asyncio.Semaphore(self._concurrency)
        async with openai.AsyncOpenAI(**self._options) as client:
            return await asyncio.gather(*(self._one(client, gate, r) for r in requests))

    async def _one(
        self, client: openai.AsyncOpenAI, gate: asyncio.Semaphore, request: LLMRequest
    ) -> str | EffectError:
        async with gate:
            try:
                reply = await client.chat.completions.create(
                    model=self.name,
                    messages=[{"role": m.role, "content": m.content} for m in request.messages],  # type: ignore[misc]
                    temperature=request.sampling.temperature,
                    top_p=request.sampling.top_p,
                    max_tokens=request.sampling.max_tokens,
                    seed=request.seed,
                )
            except (openai.OpenAIError, ValueError) as error:  # a ValueError: no JSON
                return EffectError(f"{self.name} failed on {request.purpose}: {error}")
        try:
            return str(reply.choices[0].message.content or "")
        except (AttributeError, IndexError, TypeError):
            sent = str(reply)[:200]
            return EffectError(f"{self.name} sent no completion for {request.purpose}: {sent!r}")
