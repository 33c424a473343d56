"""An OpenAI-compatible server as the frozen language model: concurrent, with retries."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jax_ragrl.config.schema import is_http
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.json_text import loads
from jax_ragrl.llm.base import MeteredReply, seed_of
from jax_ragrl.llm.cache import ReplyCache, count_hit, request_key
from jax_ragrl.llm.recorded import read_replies
from jax_ragrl.runtime.gate import Gate
from jax_ragrl.runtime.servers import (
    BoundedClient,
    Tries,
    TryFailed,
    check_credentials,
    describe,
    read_key,
    read_reply,
    retry_after,
    wait_for,
)
from jax_ragrl.types import LLMRequest

T = TypeVar("T")
OPENAI, CHAT = "https://api.openai.com/v1", "/chat/completions"
TRANSIENT = (408, 409, 429)  # in addition to 5xx, as in OpenAI's client
OVERLOAD_CODES = (429, 503)  # with fewer requests at once the server may answer
MAX_TOKENS = 1 << 30  # of one reply, as a server may report them
PAUSE = 0.5  # seconds before the second try
WORDS = 12  # of a request, in a message
TOO_SLOW = (
    "raise llm.timeout (or judge.timeout), or start the server with fewer requests at once "
    "(llama.cpp: --parallel, vLLM: --max-num-seqs)"
)


class OpenAILLM:
    """A chat model behind `base_url`; the API key is read from `OPENAI_API_KEY`.

    Args:
      model: the server's name of the model.
      base_url: e.g. `http://localhost:8000/v1`; None is OpenAI's own service.
      concurrency: maximum number of requests in flight; fewer if the server is overloaded, see
        `runtime.gate.Gate`.
      retries: tries after the first, on time-outs, lost connections, 408, 409, 429, 5xx, and
        replies that are not chat completions; see `runtime.servers.Tries` for the pauses.
      timeout: seconds of a try to the last byte of its reply; more after a try that was late.
      extra: further fields of each request, such as `{"reasoning_effort": "low"}`; they override
        `temperature`, `top_p`, `max_tokens` and `seed`, and None omits a field.
      cache: a file of earlier replies, see `llm.cache`; None: every request is sent.
      replies: a file of recorded replies, which precede those of `cache`, see `llm.recorded`.
      replies_only: whether a request without a recorded reply is an error.

    Raises:
      UserError: no model, a malformed address, no key for OpenAI's own service, numbers that allow
        no request, or unreadable recorded replies.
    """

    def __init__(
        self,
        model: str,
        base_url: str | None = None,
        *,
        concurrency: int = 256,
        retries: int = 5,
        timeout: float = 60.0,
        extra: Mapping[str, Any] | None = None,
        cache: pathlib.Path | None = None,
        replies: pathlib.Path | None = None,
        replies_only: bool = False,
    ) -> None:
        # Checked here, because the first request may come hours after the start of a run.
        if concurrency < 1 or retries < 0 or timeout <= 0:
            raise UserError(
                f"{model}: concurrency {concurrency}, retries {retries} and timeout {timeout} "
                "allow no request: give at least 1, at least 0, and more than 0 seconds"
            )
        key = read_key("OPENAI_API_KEY")
        address = base_url or os.environ.get("OPENAI_BASE_URL", "")
        if not model or (address and not is_http(address)):
            raise UserError(
                f"model {model!r} at {address!r} is not a language model: give the server's "
                "name of the model, and an address such as http://HOST:PORT/v1"
            )
        if not (address or key or replies_only):
            raise UserError(
                f"{model} has no address, and OPENAI_API_KEY, which OpenAI's own service needs, is "
                "not set: set it, or give a server's address (openai:MODEL@URL, or llm.base_url)"
            )
        check_credentials(address)
        self.name = model
        self._label = f"{model} at {address}" if address else model
        self._tries = Tries(retries, PAUSE)
        self._url = (address or OPENAI).rstrip("/")
        # As OpenAI's own client; most other servers work without a key.
        own = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}
        headers = {name: value for name, x in own.items() if (value := read_key(x))}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._headers = {"Content-Type": "application/json", **headers}
        self._client = BoundedClient(timeout)
        self._gate, self._ranks = Gate(concurrency, timeout), itertools.count()
        self._timeout, self._extra = timeout, extra or {}
        self._in_flight: dict[bytes, asyncio.Future[str | EffectError]] = {}
        self._cache = ReplyCache(cache) if cache is not None else None
        self._file, self._replies_only = replies, replies_only
        self._recorded = read_replies(replies) if replies is not None else None

    def complete(self, requests: Sequence[LLMRequest]) -> Sequence[str | EffectError]:
        """Returns one reply per request, in order; an `EffectError` after the last retry."""

        # Synchronous for its callers: the worker threads of a rollout have no event loop.
        async def replies() -> list[str | EffectError]:
            return await asyncio.gather(*(self._one(request) for request in requests))

        return wait_for(replies())

    async def _one(self, request: LLMRequest) -> str | EffectError:
        body = self._body(request)
        key = request_key(body, seed_of(request.seed, body.get("temperature")))
        # Equal requests that are in flight together are sent once.
        while (other := self._in_flight.get(key)) is not None:
            await asyncio.wait([other])
            if not other.cancelled():
                return other.result()
        if (reply := self._stored(key, request)) is not None:
            return reply
        self._in_flight[key] = own = asyncio.get_running_loop().create_future()
        try:
            outcome = await self.ask(CHAT, body, request.purpose, read_completion)
            if self._cache is not None and not isinstance(outcome, EffectError):
                self._cache.put(key, outcome, body)
            own.set_result(outcome)
            return outcome
        finally:
            del self._in_flight[key]
            own.cancel()  # if there is no result: one of the requests that wait is sent then

    def _stored(self, key: bytes, request: LLMRequest) -> str | None:
        """Returns the recorded reply to a request, or that of the cache."""
        if self._recorded is not None and self._file is not None:
            if (reply := self._recorded.get(key)) is not None:
                count_hit(self._file.name)
                return reply
            if self._replies_only:
                words = " ".join(request.messages[-1].content.split()[:WORDS])
                raise UserError(
                    f"{self._file} has no reply of {self.name} to the request {request.purpose!r} "
                    f"that begins with {words!r}; it holds {self._recorded}: set "
                    "llm.replies_only=False and start the server, then add its replies with "
                    "'ragrl replies'"
                )
        return self._cache.get(key) if self._cache is not None else None

    async def ask(
        self, path: str, body: Mapping[str, Any], purpose: str, read: Callable[[bytes], T]
    ) -> T | EffectError:
        """Sends one request, with retries; returns what `read` finds in the body of its reply.

        Args:
          path: after the address of the server, or a whole address.
          body: the JSON of the request.
          purpose: names the request in an error.
          read: as in `runtime.servers.read_reply`.
        """
        rank, remedy = next(self._ranks), ""
        try:
            return await self._tries.ask(
                lambda patience: self._attempt(path, body, patience, read),
                lambda: self._gate.slot(rank),
            )
        except (TryFailed, EffectError) as error:
            if isinstance(error, TryFailed) and error.is_late:
                remedy = f": {TOO_SLOW}"
            why = str(error).removesuffix(".")
        return EffectError(f"{self._label} failed on {purpose}: {why}{remedy}")

    async def _attempt(
        self, path: str, body: Mapping[str, Any], patience: float, read: Callable[[bytes], T]
    ) -> T:
        """Makes one try; see `Tries.ask` for its argument and its errors."""
        start = time.monotonic()
        try:
            reply = await self._client.ask(
                "POST",
                path if is_http(path) else f"{self._url}{path}",
                content=json.dumps(body),
                headers=self._headers,
                timeout=patience * self._timeout,
            )
        except TryFailed:
            # A time-out, or a connection that a full server refuses.
            self._gate.count_overload(start)
            raise
        if not reply.is_success:
            code, why = reply.status_code, describe(reply)
            if code in OVERLOAD_CODES:
                self._gate.count_overload(start)
            if code in TRANSIENT or code >= 500:
                raise TryFailed(why, retry_after(reply.headers))
            raise EffectError(why)
        self._gate.count_reply(start)
        return read_reply(reply, read)

    def _body(self, request: LLMRequest) -> dict[str, Any]:
        """The JSON of a request without fields of None, and without the seed if it is greedy."""
        messages = [message._asdict() for message in request.messages]
        common = {"model": self.name, "messages": messages, **request.sampling._asdict()}
        fields = {**common, "seed": request.seed, **self._extra}
        if fields["temperature"] == 0 and "seed" not in self._extra:
            del fields["seed"]
        return {name: value for name, value in fields.items() if value is not None}


def read_completion(body: bytes) -> str:
    """Returns the text of a chat completion, with the token counts that its server reports.

    A list of text parts is joined. Content of null is empty: all tokens may have been spent on
    reasoning. Impossible counts are treated as missing.

    Raises:
      ValueError: the body is not a chat completion; the message names the fault.
    """
    value = loads(body)
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list) or not choices:
        raise ValueError("it has no list of choices")
    message = choices[0].get("message") if isinstance(choices[0], dict) else None
    if not isinstance(message, dict) or "content" not in message:
        raise ValueError("its first choice has no message with content")
    text, usage = _text(message["content"]), value.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    counts: list[Any] = [usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")]
    if not all(type(count) is int and 0 <= count <= MAX_TOKENS for count in counts):
        return text
    return MeteredReply(text, *counts)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise ValueError(f"its content is of type {type(content).__name__}, and not text")
    return "".join(map(str, texts))
