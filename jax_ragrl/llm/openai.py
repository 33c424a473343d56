"""Any OpenAI-compatible server as the frozen language model: concurrent, retried, counted."""

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
    """A chat model behind `base_url`; the key comes from `OPENAI_API_KEY`, where one is needed.

    Raises `UserError` for no model, an address that is none, the service's own without a key, and
    numbers that allow no request.

    Args:
      model: the server's name of the model.
      base_url: e.g. `http://localhost:8000/v1`; None for the service's own.
      concurrency: requests in flight at once.
      retries: tries after the first, with exponential back-off, on time-outs, 429 and 5xx; a
        server that says when to come back (up to a minute) is taken at its word.
      timeout: seconds to wait for a reply.
      extra: what else each request holds, or holds instead, such as `{"reasoning_effort": "low"}`;
        None leaves out what would be there (`temperature`, `top_p`, `max_tokens`, `seed`).
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
        if concurrency < 1 or retries < 0 or timeout <= 0:
            raise UserError(
                f"{model}: concurrency {concurrency}, retries {retries} and timeout {timeout} "
                "allow no request: give at least 1, 0 and some seconds"
            )
        key, base_url = os.environ.get("OPENAI_API_KEY"), base_url or None
        address = base_url or os.environ.get("OPENAI_BASE_URL")
        if not model or (address and not address.startswith(("http://", "https://"))):
            raise UserError(
                f"model {model!r} at {address!r} is no language model: give its name on the server "
                "and an address such as http://HOST:PORT/v1"
            )
        if not (address or key):
            raise UserError(
                f"{model} has no address, and OPENAI_API_KEY for the service's own is not set: set "
                "it, or give the address of another server (openai:MODEL@URL, or llm.base_url)"
            )
        self.name = model
        self._told = f"{model} at {address}" if address else model
        # Most servers of one's own ask for no key, but the client does.
        self._client: dict[str, Any] = {"api_key": key or "none", "base_url": base_url}
        self._client |= {"max_retries": retries, "timeout": timeout}
        self._concurrency, self._extra = concurrency, extra or {}

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """One reply a request, in order; an `EffectError` after the last retry."""
        return asyncio.run(self._all(requests))

    async def _all(self, requests: Sequence[LLMRequest]) -> list[str | EffectError]:
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
                    extra_body=self._options(request),
                )
            except (openai.OpenAIError, ValueError) as error:  # the latter: JSON that breaks off
                return self._failed(request, str(error).removesuffix("."))
            # A proxy's page is a string here, and an error in a reply of 200 leaves no choices.
            choices = getattr(reply, "choices", None)
            if not choices or choices[0].message is None:
                told = " ".join(str(reply).split())[:200]
                return self._failed(request, f"it sent {told!r}")
            return _metered(choices[0].message.content or "", reply.usage)

    def _options(self, request: LLMRequest) -> dict[str, Any]:
        options = {**request.sampling._asdict(), "seed": request.seed, **self._extra}
        return {name: value for name, value in options.items() if value is not None}

    def _failed(self, request: LLMRequest, why: str) -> EffectError:
        return EffectError(f"{self._told} failed on {request.purpose}: {why}")


def _metered(text: str, usage: openai.types.CompletionUsage | None) -> str:
    """With what the server bills, where it says so."""
    read, written = (getattr(usage, f"{kind}_tokens", None) for kind in ("prompt", "completion"))
    return text if read is None or written is None else MeteredReply(text, read, written)
