"""HTTP requests with retries, for servers that may be unavailable for a while."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import httpx2

from jax_ragrl.config.schema import is_http
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.runtime.servers import (
    BoundedClient,
    Tries,
    TryFailed,
    UnavailableError,
    check_credentials,
    describe,
    read_reply,
    retry_after,
    wait_for,
)

T = TypeVar("T")
TRANSIENT = (429, 502, 503, 504)  # independent of the request; worth a retry


class RefusedError(EffectError):
    """A reply of another status than 200 to the request itself."""

    def __init__(self, why: str, status: int) -> None:
        super().__init__(why)
        self.status = status


class RetryingClient:
    """An HTTP client that retries time-outs, lost connections, 429, 5xx and unreadable replies.

    `timeout` is in seconds, from the start of a try to the last byte of its reply; more after a try
    that was late. `pause` is the seconds before the second try (see `runtime.servers`).

    Raises:
      UserError: a malformed address, negative retries, or a timeout that is not positive.
    """

    def __init__(self, place: str, retries: int, timeout: float, pause: float) -> None:
        if not _is_address(place):
            raise UserError(f"{place!r} is not the address of a retriever: give http://HOST:PORT")
        if retries < 0 or timeout <= 0:
            raise UserError(
                f"{place}: retries {retries} and timeout {timeout} allow no request: retries must "
                "be at least 0, and timeout above 0 seconds"
            )
        check_credentials(place)
        self.place = place
        self._count, self._tries = retries + 1, Tries(retries, pause)
        self._client, self._timeout = BoundedClient(timeout), timeout

    def post(
        self, path: str, body: Any, read: Callable[[bytes], T], *, key: str = "", **options: Any
    ) -> T:
        """Posts JSON, see `send`."""
        headers = {"Content-Type": "application/json"} | ({"X-API-KEY": key} if key else {})
        return self.send("POST", path, read, content=json.dumps(body), headers=headers, **options)

    def send(
        self,
        method: str,
        path: str,
        read: Callable[[bytes], T],
        *,
        patient: bool = True,
        **request: Any,
    ) -> T:
        """Returns the value that `read` parses from a reply, after retries if they can help.

        A reply that `read` refuses is requested again; an internal error of the server (500) only
        if `patient`. `request` has further arguments of `httpx2.AsyncClient.request`.

        Raises:
          UnavailableError: the server was unavailable in all tries.
          RefusedError: it replied with another status than 200.
          EffectError: the request is invalid, for example too long, or no reply could be read.
        """

        async def attempt(patience: float) -> T:
            deadline = {"timeout": patience * self._timeout}
            reply = await self._client.ask(method, f"{self.place}{path}", **{**request, **deadline})
            status = reply.status_code
            if status == 200:
                return read_reply(reply, read)
            why = describe(reply)
            if status in TRANSIENT or (status >= 500 and patient):
                raise TryFailed(why, retry_after(reply.headers), reply)
            raise RefusedError(why, status)

        try:
            return wait_for(self._tries.ask(attempt))
        except UnavailableError as error:
            raise UnavailableError(f"{self.place}: {error}") from error
        except TryFailed as error:
            why = f"{self.place} failed {self._count} times, the last with {error}"
            status = error.reply.status_code if error.reply is not None else None
            if status is None or status in TRANSIENT:
                raise UnavailableError(why) from error
            raise (
                EffectError(why) if status == 200 else RefusedError(str(error), status)
            ) from error


def _is_address(place: str) -> bool:
    try:
        host = httpx2.URL(place).host
        host.encode("idna")  # an empty label, such as in `a..b`, is in no name
    except (httpx2.InvalidURL, UnicodeError):
        return False
    return bool(host) and is_http(place)
