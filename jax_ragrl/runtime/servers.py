"""Requests to servers that may be slow, unavailable or wrong: the rules that all clients share.

  a try     ends with the complete reply, at its deadline, or at `MAX_BODY` bytes
  deadline  `timeout` seconds from the start of a try; twice as long after each try that was late,
            up to `PATIENCE` times: a slow server is not an unavailable one
  retries   after pauses that double; a server's `Retry-After` replaces the pause
  breaker   a server that failed `FAILURES` requests in a row, or was silent during all tries of
            one, gets one request at a time, and the requests that wait for its outcome fail with it

All requests run in one event loop of the process, so that connections are used again and callers
run no event loop.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime
import email.utils
import functools
import itertools
import math
import os
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import httpx2

from jax_ragrl.errors import HIDDEN, EffectError, UserError

T = TypeVar("T")
MAX_BODY = 64 << 20  # bytes of a reply, unzipped: some 100,000 passages
MAX_PAUSE = 60.0  # seconds: the longest pause that a server may ask for
PATIENCE = 4.0  # the longest deadline, in units of the first one
FAILURES = 8  # requests in a row, each after all of its tries

# Events of this process since the last `take_counts`, by the name of their metric.
COUNTS = collections.Counter[str]()


def take_counts() -> dict[str, float]:
    """Returns the events since the last call."""
    counts = dict(COUNTS)
    COUNTS.subtract(counts)
    return {name: float(count) for name, count in counts.items() if count}


class TryFailed(Exception):  # noqa: N818 - one try of several
    """A try failed in a way that another try may not: why, and what the server asked or sent.

    `retry_after` are the seconds that it asks to wait; `is_late` if the deadline ended the try.
    """

    def __init__(
        self,
        why: str,
        retry_after: float | None = None,
        reply: httpx2.Response | None = None,
        *,
        is_late: bool = False,
    ) -> None:
        super().__init__(why)
        self.retry_after, self.reply, self.is_late = retry_after, reply, is_late


class UnavailableError(EffectError):
    """A server that answered none of several tries: the next request would fail, too."""


_LOOP_LOCK = threading.Lock()


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine in the loop of all requests and returns its result."""
    with _LOOP_LOCK:  # without it, two threads could start a loop each, and share connections
        loop = _loop(os.getpid())
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:  # an interrupted caller leaves no request behind
        future.cancel()
        raise


@functools.cache
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Starts the event loop of a process: a fork inherits no threads."""
    del process
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="requests", daemon=True).start()
    return loop


class BoundedClient(httpx2.AsyncClient):
    """An HTTP client whose replies are complete within a deadline and a size.

    A drip of bytes resets the time-outs of an ordinary client, which bound the wait for the next
    byte only. `timeout` counts from the start of a request, unless the request has its own.
    """

    def __init__(self, timeout: float, max_body: int = MAX_BODY) -> None:
        # The semaphores of the clients bound the number of connections.
        limits = httpx2.Limits(max_connections=None)
        # Redirects are not followed: another host would get the prompts.
        super().__init__(timeout=timeout, limits=limits, follow_redirects=False)
        self._max_body = max_body

    async def ask(self, method: str, url: str, **options: Any) -> httpx2.Response:
        """Returns the reply to one request, of any status.

        `TryFailed` if there is none; `EffectError` if no retry can mend the request.
        """
        try:
            return await self.request(method, url, **options)
        except httpx2.RequestError as error:
            is_late = isinstance(error, httpx2.TimeoutException)
            raise TryFailed(f"{type(error).__name__}: {error}", is_late=is_late) from error
        # Of the query itself, such as an address that is too long.
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise EffectError(f"{url:.200}: invalid request ({error})") from error

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Sends a request and reads its whole reply, whose text is UTF-8.

        `httpx2.RequestError` if there is no complete, readable and small enough reply in time.
        """
        seconds = request.extensions["timeout"]["read"]
        try:
            async with asyncio.timeout(seconds):
                reply = await super().send(request, **{**options, "stream": True})
                return await self._complete(reply)
        except TimeoutError:
            why = f"no complete reply within {seconds:g} s"
            raise httpx2.ReadTimeout(why, request=request) from None
        except httpx2.RequestError:
            raise
        except Exception as error:  # a server chooses what the libraries beneath read and raise
            why = f"{type(error).__name__}: {error}"
            raise httpx2.RemoteProtocolError(why, request=request) from error

    async def _complete(self, reply: httpx2.Response) -> httpx2.Response:
        body, request = bytearray(), reply.request
        try:
            async for chunk in reply.aiter_bytes():
                body += chunk
                if len(body) > self._max_body:
                    why = f"the reply is larger than {self._max_body} bytes"
                    raise httpx2.RemoteProtocolError(why, request=request)
        finally:
            await reply.aclose()
        # The body is decoded and complete: headers that describe its transfer no longer hold.
        transfer = ("content-encoding", "content-length", "transfer-encoding")
        headers = [(name, x) for name, x in reply.headers.multi_items() if name not in transfer]
        complete = httpx2.Response(
            reply.status_code, headers=headers, content=bytes(body), request=request
        )
        # JSON is UTF-8 (RFC 8259, section 8.1). A `charset` could name any of Python's codecs, some
        # of which fail, or are no encodings of text.
        complete.encoding = "utf-8"
        return complete


def describe(reply: httpx2.Response) -> str:
    """Returns status, start and new address of a reply, for an error message."""
    place = reply.headers.get("location")
    moved = f": it has moved to {place}: give that address" if place else ""
    return f"status {reply.status_code}: {excerpt(reply.text)}{moved}"


def read_reply(reply: httpx2.Response, read: Callable[[bytes], T]) -> T:
    """Returns `read` of the body of a reply: the one place that parses what servers send.

    Raises `TryFailed` whatever `read` raised, except an `EffectError`, which asks for no other try.
    """
    try:
        return read(reply.content)
    except EffectError:
        raise
    except Exception as error:  # a value of JSON that a parser did not expect ends no run
        raise TryFailed(f"the reply {excerpt(reply.text)} ({error})", None, reply) from error


def read_key(variable: str) -> str:
    """Returns an API key of the environment or ""; `UserError` if no header may contain it."""
    key = os.environ.get(variable, "").strip()  # key files often end in a newline
    if not (key.isascii() and key.isprintable()):
        raise UserError(f"{variable} contains invalid characters; copy the key again")
    return key


class Tries:
    """How often one server is asked, and whether it is asked at all.

    The pause in seconds before the second try doubles before each further one.
    """

    def __init__(self, retries: int, pause: float) -> None:
        self._retries, self._pause = retries, pause
        self.failures = 0  # requests in a row, each after all of its tries
        self._answers = 0
        self._patience = 1.0  # of a first try: that of the most patient one that had a reply
        self._trial = asyncio.Lock()

    async def ask(
        self,
        attempt: Callable[[float], Awaitable[T]],
        slot: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> T:
        """Returns the result of the first try that succeeds.

        Args:
          attempt: one try, whose argument is its deadline in units of the first one. `TryFailed`
            asks for another; any other error ends the request, and shows that the server works.
          slot: a try waits for it; pauses between tries need none.

        Raises:
          TryFailed: the last try failed.
          UnavailableError: the server failed many requests in a row, and failed again.
        """
        earlier = self.failures  # those that fail while this request waits decide for it, too
        if self.failures < FAILURES:
            return await self._retried(attempt, slot, earlier)
        async with self._trial:
            self._check(earlier)
            if self.failures:
                return await self._retried(attempt, slot, earlier)
        return await self._retried(attempt, slot, earlier)

    def _check(self, earlier: int) -> None:
        if self.failures >= FAILURES and self.failures > earlier:
            COUNTS["server_skipped"] += 1
            raise UnavailableError(
                f"not sent: the last {self.failures} requests to this server failed"
            )

    async def _retried(
        self,
        attempt: Callable[[float], Awaitable[T]],
        slot: Callable[[], AbstractAsyncContextManager[None]],
        earlier: int,
    ) -> T:
        patience, answers, is_silent = self._patience, self._answers, True
        for number in itertools.count():
            async with slot():
                self._check(earlier)
                try:
                    result = await attempt(patience)
                except TryFailed as error:
                    failure = error
                except Exception:
                    self.failures, self._answers = 0, self._answers + 1
                    raise
                else:
                    self.failures, self._answers = 0, self._answers + 1
                    self._patience = max(self._patience, patience)
                    return result
            is_silent = is_silent and failure.is_late and self._answers == answers
            if number == self._retries:
                # Without it, each of many requests would wait for all of its deadlines in turn.
                self.failures = max(self.failures + 1, FAILURES if is_silent and number else 0)
                raise failure
            patience = min(2 * patience, PATIENCE) if failure.is_late else patience
            COUNTS["server_retries"] += 1
            await asyncio.sleep(self._wait(number, failure.retry_after))
        raise AssertionError  # the loop has no end

    def _wait(self, number: int, retry_after: float | None) -> float:
        # Pauses differ a little, so that many requests do not return at the same moment.
        own = self._pause * 2.0 ** min(number, 30) * random.uniform(0.75, 1)
        return min(own if retry_after is None else retry_after, MAX_PAUSE)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Returns the seconds that a server asks to wait (RFC 9110, section 10.2.3), or None."""
    value = headers.get("retry-after", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        seconds = _seconds_until(value)
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _seconds_until(date: str) -> float:
    try:
        moment = email.utils.parsedate_to_datetime(date)
        # A date without a zone is in UTC.
        moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
        return (moment - datetime.datetime.now(datetime.UTC)).total_seconds()
    except Exception:  # Python's parser raises more than it documents
        return math.nan


def check_credentials(address: str) -> None:
    """Raises `UserError` for an address whose credentials were removed when it was saved."""
    if f"://{HIDDEN}@" in address:
        raise UserError(
            f"{address} is from a saved config, which holds no credentials: give the whole address "
            "again (--config.llm.base_url, --config.judge.base_url or --config.index.url)"
        )


def excerpt(text: str, length: int = 200) -> str:
    """Returns the start of a text on one line, quoted, for an error message."""
    return repr(" ".join(text[: 4 * length].split())[:length])
