"""HTTP requests with retries, for servers that may be unavailable for a while."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from jax_ragrl.config.schema import is_http
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.json_text import loads
from jax_ragrl.runtime.servers import (
    BoundedClient,
    Tries,
    TryFailed,
    check_credentials,
    excerpt,
    retry_after,
    wait_for,
)
from jax_ragrl.types import Hits

TRANSIENT = (429, 502, 503, 504)  # independent of the request; worth a retry


def is_json(content: bytes) -> bool:
    """Whether a body holds JSON, not a proxy's page or half a reply."""
    try:
        loads(content)
    except ValueError:
        return False
    return True


class RetryingClient:
    """An HTTP client that retries time-outs, lost connections, 429, 5xx and unreadable replies.

    Args:
      place: the address of the server.
      retries: tries after the first.
      timeout: seconds from the start of a try to the last byte of its reply.
      pause: seconds before the second try; see `runtime.servers.Tries`.

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
        self._client = BoundedClient(timeout)

    def post(self, path: str, body: Any, *, key: str = "", **options: Any) -> httpx2.Response:
        """Posts JSON, see `send`.

        Args:
          path: appended to the address.
          body: a value for JSON.
          key: the user's API key; empty sends none.
          options: `patient` and `is_readable` of `send`.
        """
        headers = {"Content-Type": "application/json"} | ({"X-API-KEY": key} if key else {})
        return self.send("POST", path, content=json.dumps(body), headers=headers, **options)

    def send(
        self,
        method: str,
        path: str,
        *,
        patient: bool = True,
        is_readable: Callable[[bytes], bool] = is_json,
        **request: Any,
    ) -> httpx2.Response:
        """Retries until a reply that another try would not change.

        Args:
          method: the HTTP method.
          path: appended to the address.
          patient: whether an internal error of the server (500) is retried too; if not, it is
            returned at once.
          is_readable: whether the body of a reply with status 200 has the right form; if not, the
            request is tried again.
          request: further arguments of `httpx2.AsyncClient.request`.

        Raises:
          UserError: the request is invalid, for example too long.
          EffectError: the server was unavailable in all tries.
        """

        async def attempt() -> httpx2.Response:
            reply = await self._attempt(method, path, request)
            status = reply.status_code
            is_bad = status == 200 and not is_readable(reply.content)
            if status in TRANSIENT or (status >= 500 and patient) or is_bad:
                why = f"status {status}: {excerpt(reply.text)}"
                raise TryFailed(why, retry_after(reply.headers), reply)
            return reply

        try:
            return wait_for(self._tries.ask(attempt))
        except TryFailed as error:
            # The last reply to the request itself is for the caller to read.
            if error.reply is not None and error.reply.status_code not in TRANSIENT:
                return error.reply
            why = f"{self.place} failed {self._count} times, the last with {error}"
        # Errors of the query itself, such as an address that is too long, which no retry can fix.
        except (httpx2.InvalidURL, UnicodeError) as error:
            raise UserError(f"{self.place}: invalid request ({error})") from error
        except EffectError as error:
            why = f"{self.place}: {error}"
        raise EffectError(why)

    async def _attempt(self, method: str, path: str, request: dict[str, Any]) -> httpx2.Response:
        try:
            return await self._client.request(method, f"{self.place}{path}", **request)
        except httpx2.RequestError as error:
            raise TryFailed(f"{type(error).__name__}: {error}") from error


def _is_address(place: str) -> bool:
    try:
        host = httpx2.URL(place).host
        host.encode("idna")  # an empty label, such as in `a..b`, is in no name
    except (httpx2.InvalidURL, UnicodeError):
        return False
    return bool(host) and is_http(place)


def check_refusals(
    results: Sequence[Hits | UserError | EffectError], has_answered: bool
) -> list[Hits | EffectError]:
    """Raises the first refusal of a server that never answered; else turns it into a failure.

    Args:
      results: one result per query; a `UserError` is a refusal.
      has_answered: whether the server has ever returned hits. If it has, its address is right, and
        a refusal concerns one query alone.

    Raises:
      UserError: a refusal of a server that never returned hits: the address, or the request, is
        wrong.
    """
    refusal = next((x for x in results if isinstance(x, UserError)), None)
    if refusal is not None and not has_answered:
        raise refusal
    return [EffectError(str(x)) if isinstance(x, UserError) else x for x in results]
