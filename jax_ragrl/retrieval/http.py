"""Requests to a retrieval server that may be away for a while."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.types import Hits

AWAY = (429, 502, 503, 504)  # over by itself, whatever is asked


class Patient:
    """Asks again, after pauses that double, on time-outs, broken connections, 429 and 5xx.

    Args:
      place: the address of the server.
      retries: tries after the first.
      timeout: seconds to connect, and to wait for more of a reply.
      pause: seconds before the second try.

    Raises:
      UserError: an address of another form, or numbers that allow no request.
    """

    def __init__(self, place: str, retries: int, timeout: float, pause: float) -> None:
        try:
            whole = httpx2.URL(place).host and place.startswith(("http://", "https://"))
        except httpx2.InvalidURL:
            whole = False
        if not whole:
            raise UserError(f"{place!r} is no address of a retriever: give http://HOST:PORT")
        if retries < 0 or timeout <= 0:
            raise UserError(
                f"{place}: retries {retries} and timeout {timeout} allow no request: give at least "
                "0 and some seconds"
            )
        self.place = place
        self._retries, self._pause = retries, pause
        self._client = httpx2.Client(timeout=timeout)

    def post(self, path: str, body: Any, *, patient: bool = True, key: str = "") -> httpx2.Response:
        """The reply to a body of JSON, with the user's `key` where there is one. As `ask`."""
        headers = {"Content-Type": "application/json"} | ({"X-API-KEY": key} if key else {})
        content = json.dumps(body)
        return self.ask("POST", path, patient=patient, content=content, headers=headers)

    def ask(self, method: str, path: str, *, patient: bool = True, **what: Any) -> httpx2.Response:
        """The first reply that asking again would not change: an error of the server's (500) only
        where that has been tried, or need not be (not `patient`).

        Raises:
          UserError: an address or parameters of which no request can be made: too long, say.
          EffectError: the server stayed away through all tries.
        """
        tries, why = self._retries + 1, ""
        for i in range(tries):
            time.sleep(self._pause * 2 ** (i - 1) if i else 0)
            try:
                reply = self._client.request(method, f"{self.place}{path}", **what)
            except httpx2.RequestError as error:
                why = f"{type(error).__name__}: {error}"
                continue
            except (httpx2.InvalidURL, UnicodeError) as error:
                raise UserError(f"{self.place} cannot be asked this ({error})") from error
            last = i + 1 == tries or not patient
            if reply.status_code not in AWAY and (reply.status_code < 500 or last):
                return reply
            why = f"status {reply.status_code}: {reply.text[:200]!r}"
        raise EffectError(f"{self.place} failed {tries} times, the last with {why}")


def unless_refused(
    found: Sequence[Hits | UserError | EffectError], known: bool
) -> list[Hits | EffectError]:
    """What was found; of a server `known` to find something, a refusal is a failure like others.

    Raises:
      UserError: the first refusal of one that is not: its address, or what is asked, is to blame.
    """
    wrong = next((x for x in found if isinstance(x, UserError)), None)
    if wrong is not None and not known:
        raise wrong
    return [EffectError(str(x)) if isinstance(x, UserError) else x for x in found]
