"""HTTP requests with retries, for servers that may be unavailable for a while."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.types import Hits

TRANSIENT = (429, 502, 503, 504)  # independent of the request; worth a retry


class RetryingClient:
    """An HTTP client that retries with doubling pauses on time-outs, lost connections, 429, 5xx.

    Args:
      place: the address of the server.
      retries: tries after the first.
      timeout: seconds to connect, and to wait for the next bytes of a reply.
      pause: seconds before the second try.

    Raises:
      UserError: a malformed address, negative retries, or a timeout that is not positive.
    """

    def __init__(self, place: str, retries: int, timeout: float, pause: float) -> None:
        try:
            valid = httpx2.URL(place).host and place.startswith(("http://", "https://"))
        except httpx2.InvalidURL:
            valid = False
        if not valid:
            raise UserError(f"{place!r} is not the address of a retriever: give http://HOST:PORT")
        if retries < 0 or timeout <= 0:
            raise UserError(
                f"{place}: retries {retries} and timeout {timeout} allow no request: retries must "
                "be at least 0, and timeout above 0 seconds"
            )
        self.place = place
        self._retries, self._pause = retries, pause
        self._client = httpx2.Client(timeout=timeout)

    def post(self, path: str, body: Any, *, patient: bool = True, key: str = "") -> httpx2.Response:
        """Posts JSON, see `send`.

        Args:
          path: appended to the address.
          body: a value for JSON.
          patient: see `send`.
          key: the user's API key; empty sends none.
        """
        headers = {"Content-Type": "application/json"} | ({"X-API-KEY": key} if key else {})
        content = json.dumps(body)
        return self.send("POST", path, patient=patient, content=content, headers=headers)

    def send(
        self, method: str, path: str, *, patient: bool = True, **request: Any
    ) -> httpx2.Response:
        """Retries until a reply that another try would not change.

        Args:
          method: the HTTP method.
          path: appended to the address.
          patient: whether an internal error of the server (500) is retried too; if not, it is
            returned at once.
          request: further arguments of `httpx2.Client.request`.

        Raises:
          UserError: the request is invalid, for example too long.
          EffectError: the server was unavailable in all tries.
        """
        tries, why = self._retries + 1, ""
        for i in range(tries):
            time.sleep(self._pause * 2 ** (i - 1) if i else 0)
            try:
                reply = self._client.request(method, f"{self.place}{path}", **request)
            except httpx2.RequestError as error:
                why = f"{type(error).__name__}: {error}"
                continue
            # Errors of the query itself, such as an address that is too long, which no retry can
            # fix.
            except (httpx2.InvalidURL, UnicodeError) as error:
                raise UserError(f"{self.place}: invalid request ({error})") from error
            last = i + 1 == tries or not patient
            if reply.status_code not in TRANSIENT and (reply.status_code < 500 or last):
                return reply
            why = f"status {reply.status_code}: {reply.text[:200]!r}"
        raise EffectError(f"{self.place} failed {tries} times, the last with {why}")


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
