"""Who may ask a server: API keys, and protection from web pages and from greedy clients."""

from __future__ import annotations

import collections
import hmac
import ipaddress
import os
import pathlib
import socket
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from jax_ragrl.errors import UserError
from jax_ragrl.serve.refusals import refuse

KEY_VARIABLE = "RAGRL_API_KEY"
MIN_KEY = 16  # characters
OPEN_PATHS = ("/", "/health")  # the page has a field for the key; probes have no key


class Access(NamedTuple):
    """Who may ask a server.

    Fields:
      keys: API keys, of which a request has to present one; empty: every client may ask.
      is_open: whether to serve other machines without a key.
      hosts: further names of the server; IP addresses, localhost and the bound name are known.
      per_client: max requests in progress per address.
    """

    keys: tuple[str, ...] = ()
    is_open: bool = False
    hosts: tuple[str, ...] = ()
    per_client: int = 64


class Guard:
    """Refuses requests that `access` does not allow; `host` is the bound address."""

    def __init__(self, access: Access, host: str) -> None:
        self._access = access
        self._keys = [key.encode() for key in access.keys]
        self._hosts = {name.lower() for name in (*access.hosts, host, "localhost")}
        self._active: collections.Counter[str] = collections.Counter()

    def middleware(self, app: ASGIApp) -> ASGIApp:
        """Returns the application behind the guard."""

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                return await app(scope, receive, send)
            try:
                self._check(scope)
            except HTTPException as refusal:
                return await refuse(refusal)(scope, receive, send)
            client = _address(scope)
            self._active[client] += 1
            try:
                await app(scope, receive, send)
            finally:
                self._active -= collections.Counter([client])  # drops a count of zero

        return guarded

    def _check(self, scope: Scope) -> None:
        """Raises the refusal of a request, if there is a reason for one."""
        headers = Headers(scope=scope)
        self._check_page(headers)
        if scope["method"] == "POST":
            _check_type(headers)
        is_authorized = self._has_key(headers)
        scope.setdefault("state", {})["is_authorized"] = is_authorized
        if scope["path"] in OPEN_PATHS:
            return
        if not is_authorized:
            message = "this server needs an API key: send 'Authorization: Bearer KEY'"
            raise HTTPException(401, message, {"WWW-Authenticate": "Bearer"})
        if self._active[_address(scope)] >= self._access.per_client:
            limit = f"{self._access.per_client} requests of this address are in progress"
            raise HTTPException(429, f"{limit}: wait for one of them", {"Retry-After": "1"})

    def _check_page(self, headers: Headers) -> None:
        """Refuses requests of a page of another site through a browser."""
        host, origin = headers.get("host", ""), headers.get("origin")
        # A name that an attacker can point at this address would make their page part of this site.
        if not self._knows(_name(host)):
            raise HTTPException(
                403, f"the host {host[:60]!r} is unknown: start the server with --allow-host NAME"
            )
        if origin is not None and _netloc(origin) != host.lower():
            raise HTTPException(
                403, f"the origin {origin[:60]!r} is another site: ask from this server's own page"
            )

    def _knows(self, name: str) -> bool:
        return "*" in self._hosts or name in self._hosts or _is_address(name)

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        key = (bearer or headers.get("x-api-key", "")).encode("latin-1", "replace")
        # Every key is compared, in constant time, so that the time says nothing about any of them.
        matches = [hmac.compare_digest(key, known_names) for known_names in self._keys]
        return any(matches) or not self._keys


def _check_type(headers: Headers) -> None:
    # A form of a web page can send any text, but cannot send this type.
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(
            415, f"the content type is {kind[:60]!r}: send 'Content-Type: application/json'"
        )


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else ""


def _netloc(origin: str) -> str | None:
    """The name and port in an Origin header; None if it is malformed."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a bind address; a name that is unknown does not count."""
    try:
        addresses = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in addresses)


def check_access(access: Access, host: str) -> None:
    """Raises `UserError` if other machines could ask without a key."""
    if not (access.keys or access.is_open or is_loopback(host)):
        raise UserError(
            f"other machines reach {host}, and there is no API key: give --api-key-file FILE or "
            f"set {KEY_VARIABLE}, or let everyone ask with --no-api-key"
        )
    if access.per_client < 1:
        raise UserError(f"{access.per_client} requests per client: allow at least 1")


def read_keys(file: pathlib.Path | None, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the API keys of a file, one per line, or the one of the environment.

    Args:
      file: keys; blank lines and lines that start with # are ignored.
      environment: has the key `RAGRL_API_KEY` if there is no file.

    Raises:
      UserError: a key is short or has other characters than printable ASCII, or there is none.
    """
    if file is None:
        keys = [environment[KEY_VARIABLE].strip()] if environment.get(KEY_VARIABLE) else []
    else:
        keys = [line for line in map(str.strip, _lines(file)) if line and line[0] != "#"]
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


def _lines(file: pathlib.Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the API keys in {file} ({error}): check the path") from error
