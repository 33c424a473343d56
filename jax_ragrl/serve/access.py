"""Who may ask a server: API keys, and the names by which clients may call it."""

from __future__ import annotations

import hmac
import ipaddress
import os
import pathlib
import socket
from collections.abc import Mapping
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jax_ragrl.errors import UserError
from jax_ragrl.serve.bodies import refuse

KEY_VARIABLE = "RAGRL_API_KEY"
MIN_KEY = 16  # characters
OPEN_PATHS = ("/", "/health")  # the page has a field for the key; probes have no key


class Settings(NamedTuple):
    """Properties of a server that do not depend on its endpoints.

    Fields:
      host: bind address.
      port: TCP port; 0 = any free port.
      keys: API keys, of which a request has to present one; empty: every client may ask.
      is_open: whether to serve other machines without a key.
      hosts: further names by which clients may call the server.
      connections: max number of connections; further ones get status 503.
      drain: seconds from SIGTERM to the end of the requests in progress.
      mcp: `http`: also offer tools to agents at `/mcp`; `stdio`: on the standard streams alone.
    """

    host: str = "127.0.0.1"
    port: int = 0
    keys: tuple[str, ...] = ()
    is_open: bool = False
    hosts: tuple[str, ...] = ()
    connections: int = 512
    drain: int = 20
    mcp: str = ""


SETTINGS = Settings()


class KeyCheck:
    """Answers requests without one of the keys with status 401, before their body is read."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            scheme, _, token = headers.get("authorization", "").partition(" ")
            bearer = token.strip() if scheme.lower() == "bearer" else ""
            key = (bearer or headers.get("x-api-key", "")).encode("latin-1", "replace")
            # Every key is compared, in constant time: the time says nothing about any of them.
            matches = [hmac.compare_digest(key, known) for known in self._keys]
            is_authorized = any(matches) or not self._keys
            scope.setdefault("state", {})["is_authorized"] = is_authorized
            if not is_authorized and scope["path"] not in OPEN_PATHS:
                message = "this server needs an API key: send 'Authorization: Bearer KEY'"
                app = refuse(401, message, {"WWW-Authenticate": "Bearer"})
        await app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a bind address; a name that is unknown does not count."""
    try:
        addresses = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in addresses)


def check_access(settings: Settings) -> None:
    """Raises `UserError` if other machines could ask without a key, or a name is malformed."""
    if not (settings.keys or settings.is_open or is_loopback(settings.host)):
        raise UserError(
            f"other machines reach {settings.host}, and there is no API key: give --api-key-file "
            f"FILE or set {KEY_VARIABLE}, or let everyone ask with --no-api-key"
        )
    for name in settings.hosts:
        if name != "*" and "*" in name.removeprefix("*."):
            raise UserError(f"--allow-host {name}: give NAME, *.NAME (all names below) or *")


def read_keys(file: pathlib.Path | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the API keys of a file, one per line, or the one of `RAGRL_API_KEY` without a file.

    Blank lines and lines that start with # are ignored.

    Raises:
      UserError: a key is short or has other characters than printable ASCII, or there is none.
    """
    if file is None:
        lines = [environment.get(KEY_VARIABLE, "")]
    else:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = f"cannot read the API keys in {file} ({error}): check the path"
            raise UserError(why) from error
    keys = [line for line in map(str.strip, lines) if line and line[0] != "#"]
    place = file or KEY_VARIABLE
    if file is not None and not keys:
        raise UserError(f"{place} holds no API key: write one key per line")
    for number, key in enumerate(keys, start=1):
        if len(key) < MIN_KEY or not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError(
                f"{place}: key {number} is not {MIN_KEY} printable ASCII characters or more: make "
                "one with 'openssl rand -hex 32'"
            )
    return keys
