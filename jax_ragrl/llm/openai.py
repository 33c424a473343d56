"""An OpenAI-compatible server as the frozen language model: concurrent, with retries."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import openai

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.types import LLMRequest


class OpenAILLM:
    """A chat model behind `base_url`; the API key is read from `OPENAI_API_KEY`.

    Args:
      model: the server's name of the model.
      base_url: e.g. `http://localhost:8000/v1`; None is OpenAI's own service.
      concurrency: maximum number of requests in flight.
      retries: tries after the first, with exponential back-off, on time-outs, 429 and 5xx; a
        `Retry-After` of up to a minute is respected.
      timeout: seconds to wait for a reply.
      extra: further fields of each request, such as `{"reasoning_effort": "low"}`; they override
        `temperature`, `top_p`, `max_tokens` and `seed`, and None omits a field.

    Raises:
      UserError: no model, a malformed address, no key for OpenAI's own service, or numbers that
        allow no request.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        *,
        concurrency: int = 32,
        retries: int = 5,
        timeout: float = 60.0,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        # Checked here, because the first request may come hours after the start of a run.
        if concurrency < 1 or retries < 0 or timeout <= 0:
            raise UserError(
                f"{model}: concurrency {concurrency}, retries {retries} and timeout {timeout} "
                "allow no request: give at least 1, at least 0, and more than 0 seconds"
            )
        # The client reads both variables too; here they decide which error the user gets.
        key, base_url = os.environ.get("OPENAI_API_KEY"), base_url or None
        address = base_url or os.environ.get("OPENAI_BASE_URL")
        if not model or (address and not address.startswith(("http://", "https://"))):
            raise UserError(
                f"model {model!r} at {address!r} is not a language model: give the server's "
                "name of the model, and an address such as http://HOST:PORT/v1"
            )
        if not (address or key):
            raise UserError(
                f"{model} has no address, and OPENAI_API_KEY, which OpenAI's own service needs, is "
                "not set: set it, or give a server's address (openai:MODEL@URL, or llm.base_url)"
            )
        self.name = model
        self._label = f"{model} at {address}" if address else model
        # Most self-hosted servers work without a key, but the client refuses to start.
        self._client: dict[str, Any] = {"api_key": key or "none", "base_url": base_url}
        self._client |= {"max_retries": retries, "timeout": timeout}
        self._concurrency, self._extra = concurrency, extra or {}

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """Returns one reply per request, in order; an `EffectError` after the last retry."""
        # Synchronous for its callers: the worker threads of a rollout have no event loop.
        return asyncio.run(self._all(requests))

    async def _all(self, requests: Sequence[LLMRequest]) -> list[str | EffectError]:
        # Both belong to one event loop, and every call of `asyncio.run` starts another one.
        gate = asyncio.Semaphore(self._concurrency)
        async with openai.AsyncOpenAI(**self._client) as client:
            return await asyncio.gather(*(self._one(client, gate, r) for r in requests))

    async def _one(
        self, client: openai.AsyncOpenAI, gate: asyncio.Semaphore, request: LLMRequest
    ) -> str | EffectError:
        async with gate:
            try:
                reply = await client.chat.completions.create(
                    model=self.name,
                    messages=[{"role": m.role, "content": m.content} for m in request.messages],  # type: ignore[misc]
                    # All options are in the body: the client's own parameters would reject the
                    # fields of other servers.
                    extra_body=self._options(request),
                )
            except (openai.OpenAIError, ValueError) as error:  # ValueError: truncated JSON
                return self._failed(request, str(error).removesuffix("."))
            # An HTML page of a proxy arrives as a string; an error with status 200 has no choices.
            choices = getattr(reply, "choices", None)
            if not choices or choices[0].message is None:
                excerpt = " ".join(str(reply).split())[:200]
                return self._failed(request, f"it sent {excerpt!r}")
            # The content may be null, for example if all tokens were spent on reasoning.
            return _metered(choices[0].message.content or "", reply.usage)

    def _options(self, request: LLMRequest) -> dict[str, Any]:
        options = {**request.sampling._asdict(), "seed": request.seed, **self._extra}
        return {name: value for name, value in options.items() if value is not None}

    def _failed(self, request: LLMRequest, why: str) -> EffectError:
        return EffectError(f"{self._label} failed on {request.purpose}: {why}")


def _metered(text: str, usage: openai.types.CompletionUsage | None) -> str:
    """Attaches the token counts that the server bills, if it reports them."""
    prompt_tokens, completion_tokens = (
        getattr(usage, f"{kind}_tokens", None) for kind in ("prompt", "completion")
    )
    if prompt_tokens is None or completion_tokens is None:
        return text
    return MeteredReply(text, prompt_tokens, completion_tokens)
