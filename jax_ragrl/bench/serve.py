"""Loads a server with good clients next to hostile ones, and then ends it.

Hostile clients open connections and send nothing, or single bytes of headers; hold bodies back;
leave during their body; and send bodies that are too large. On this machine they come from other
addresses (127.0.0.2) than the good ones, as the limits per client require. Every good request
should get an answer, and the server should end within its deadline with a request unfinished.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np

from jax_ragrl.errors import UserError

HOSTILE = "127.0.0.2"
HEAD = "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
MIB = 1 << 20
PATIENCE = 300.0  # seconds of a good client: the first batches compile
OPENING = 0.02  # seconds between the bursts in which connections are opened
BURST = 32  # connections


@dataclasses.dataclass(frozen=True)
class ServeWork:
    """The load.

    Fields:
      seconds: duration.
      clients: good clients, each with one request at a time.
      half_open: connections without complete headers.
      held: requests whose body stays incomplete.
      leaving: clients that leave during their body, again and again.
      huge: clients that send too much, again and again.
    """

    seconds: float = 10.0
    clients: int = 16
    half_open: int = 400
    held: int = 16
    leaving: int = 4
    huge: int = 2

    def __post_init__(self) -> None:
        if self.clients < 1 or not self.seconds > 0:
            raise UserError(
                f"{self.clients} clients for {self.seconds:g} seconds: give at least one client, "
                "and more than 0 seconds"
            )


@dataclasses.dataclass(frozen=True)
class Target:
    """The server under load.

    Fields:
      url: its address.
      path: the endpoint; `/answer`, or `/retrieve` of a server of a retriever.
      key: its API key, or empty.
    """

    url: str
    path: str = "/answer"
    key: str = ""

    @property
    def place(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80

    def body(self, text: str) -> dict[str, Any]:
        """A request with one text."""
        return {"question": text} if self.path == "/answer" else {"queries": [text], "topk": 3}

    def head(self, fields: str) -> bytes:
        """The start of a request, with further header lines."""
        host = "{}:{}".format(*self.place)
        bearer = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return (HEAD.format(path=self.path, host=host) + bearer + fields).encode()

    def headers(self) -> dict[str, str]:
        """Header fields of a good client."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


Attack = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Target], Awaitable[str]]


class Tally:
    """Counts of outcomes by the kind of client, and lists of measurements."""

    def __init__(self) -> None:
        self.good: collections.Counter[str] = collections.Counter()
        self.hostile: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []
        self.health_seconds: list[float] = []
        self.memory: list[int] = []


def bench_serve(work: ServeWork, target: Target | None = None) -> dict[str, Any]:
    """Loads a server, and returns what its clients saw as values for JSON.

    Args:
      work: the load.
      target: a running server; None starts `ragrl serve` with the tiny C-3PO policy, and ends it.

    Raises:
      UserError: the server does not answer.
    """
    if target is not None:
        return run_load(work, target)
    with _started() as (server, url, log):
        result = run_load(work, Target(url))
        return result | _end(server, Target(url), log)


def run_load(work: ServeWork, target: Target) -> dict[str, Any]:
    """Loads a running server, see `bench_serve`.

    Args:
      work: the load.
      target: the server.
    """
    tally = Tally()
    asyncio.run(_load(work, target, tally))
    # Without any reply the quantiles are 0, and the counts show the failures.
    seconds = np.sort(tally.seconds or [0.0])
    quantiles = {f"p{q}_s": round(float(np.percentile(seconds, q)), 3) for q in (50, 95)}
    return {
        **dataclasses.asdict(work),
        "good": dict(tally.good),
        "hostile": dict(tally.hostile),
        **quantiles,
        "max_s": round(float(seconds[-1]), 3),
        "health_max_s": round(max(tally.health_seconds, default=0.0), 3),
        "rss_start_bytes": tally.memory[0] if tally.memory else None,
        "rss_peak_bytes": max(tally.memory, default=None),
    }


async def _load(work: ServeWork, target: Target, tally: Tally) -> None:
    async with httpx2.AsyncClient(
        # Proxies of the environment would hide the server under test.
        base_url=target.url,
        timeout=PATIENCE,
        headers=target.headers(),
        trust_env=False,
    ) as http:
        await _wait_until_ready(http)
        await _probe(http, tally)
        # Hostile clients run until the good ones have their answers.
        hostile = asyncio.gather(*_hostile(work, target, tally), return_exceptions=True)
        end = time.monotonic() + work.seconds
        good = [_ask(http, target, tally, client, end) for client in range(work.clients)]
        try:
            await asyncio.gather(*good, _probe_until(http, tally, end))
        finally:
            hostile.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await hostile


async def _wait_until_ready(http: httpx2.AsyncClient, seconds: float = 300.0) -> None:
    end, failure = time.monotonic() + seconds, ""
    while time.monotonic() < end:
        try:
            reply = await http.get("/health")
            if reply.status_code == 200:
                return
            failure = f"status {reply.status_code}: {reply.text[:200]}"
        except httpx2.RequestError as error:
            failure = f"{type(error).__name__}: {error}"
        await asyncio.sleep(0.2)
    raise UserError(f"{http.base_url} is not ready ({failure}): start a server there")


async def _ask(
    http: httpx2.AsyncClient, target: Target, tally: Tally, client: int, end: float
) -> None:
    """One good client: asks until the end, and counts replies by status."""
    number = 0
    while time.monotonic() < end:
        number, start = number + 1, time.monotonic()
        # Distinct questions, so that no cache of the server answers.
        text = f"Where was number {number} of {client} born?"
        try:
            reply = await http.post(target.path, json=target.body(text))
            tally.good[str(reply.status_code)] += 1
        except httpx2.RequestError as error:
            tally.good[type(error).__name__] += 1
        tally.seconds.append(time.monotonic() - start)


async def _probe_until(http: httpx2.AsyncClient, tally: Tally, end: float) -> None:
    while time.monotonic() < end:
        await _probe(http, tally)
        await asyncio.sleep(0.25)


async def _probe(http: httpx2.AsyncClient, tally: Tally) -> None:
    """Measures the time of `/health`, and reads the memory of the server."""
    with contextlib.suppress(httpx2.RequestError):
        start = time.monotonic()
        await http.get("/health")
        tally.health_seconds.append(time.monotonic() - start)
        reply = await http.get("/metrics")
        if line := re.search(r"^process_resident_memory_bytes (\S+)", reply.text, re.MULTILINE):
            tally.memory.append(int(float(line[1])))


def _hostile(work: ServeWork, target: Target, tally: Tally) -> Iterator[Awaitable[None]]:
    """All hostile clients, each of which runs until it is canceled."""

    def many(count: int, name: str, attack: Attack) -> Iterator[Awaitable[None]]:
        for i in range(count):
            # In bursts: thousands of connections at once would overflow the backlog.
            delay = OPENING * (i // BURST)
            yield _again(name, attack, target, tally, delay)

    yield from many(work.half_open // 2, "silent", _silent)
    yield from many(work.half_open - work.half_open // 2, "slow_headers", _slow_headers)
    yield from many(work.held, "held", _held)
    yield from many(work.leaving, "leaving", _leaving)
    yield from many(work.huge, "huge", _huge)


async def _again(name: str, attack: Attack, target: Target, tally: Tally, delay: float) -> None:
    """Repeats an attack, and counts its outcomes."""
    await asyncio.sleep(delay)
    host, port = target.place
    # Another address than that of the good clients, which have their own limits.
    local = (HOSTILE, 0) if host.startswith("127.") else None
    while True:
        outcome = "refused"
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port, local_addr=local)
            outcome = "cut"
            try:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    outcome = await attack(reader, writer, target)
            finally:
                writer.close()
        tally.hostile[f"{name}: {outcome}"] += 1
        await asyncio.sleep(0.05)


async def _status(reader: asyncio.StreamReader) -> str:
    """The status of a reply; `cut` if the connection ends without one."""
    words = (await reader.readline()).split()
    return words[1].decode("latin-1") if len(words) > 1 else "cut"


async def _silent(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target
) -> str:
    return await _status(reader)


async def _slow_headers(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target
) -> str:
    writer.write(target.head("X-Slow: "))
    # One byte per second keeps the connection alive for servers without deadlines.
    while not reader.at_eof():
        writer.write(b"x")
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return await _status(reader)
    return "cut"


async def _held(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target) -> str:
    # All but the last byte, so that the server keeps the body.
    writer.write(target.head(f"Content-Length: {4 * MIB}\r\n\r\n") + b" " * (4 * MIB - 1))
    return await _status(reader)


async def _leaving(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target
) -> str:
    writer.write(target.head("Content-Length: 1000\r\n\r\n") + b"{")
    await writer.drain()
    return "left"


async def _huge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target) -> str:
    writer.write(target.head(f"Content-Length: {16 * MIB}\r\n\r\n"))
    for _ in range(16):  # the reply comes after the first of these parts
        writer.write(b" " * MIB)
        await writer.drain()
    return await _status(reader)


@contextlib.contextmanager
def _started() -> Iterator[tuple[subprocess.Popen[str], str, pathlib.Path]]:
    """Starts a server of the tiny policy; yields the process, its address and its log."""
    # Port 0 lets the system choose, so that benchmarks can run side by side.
    command = [sys.executable, "-m", "jax_ragrl", "serve", "--port", "0", "--drain-deadline", "5"]
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "stderr.txt"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
        ):
            try:
                line = next((x for x in server.stdout or () if "answers at" in x), "")
                if not line:
                    raise UserError(f"the server did not start: {log.read_text()[-300:]}")
                yield server, line.split()[-1], log
            finally:
                server.kill()


def _end(server: subprocess.Popen[str], target: Target, log: pathlib.Path) -> dict[str, Any]:
    """Asks the server to end while a request is unfinished."""
    with socket.create_connection(target.place) as hanging:
        # A body that never ends: a server without a deadline would wait for it.
        hanging.sendall(target.head("Content-Length: 1000\r\n\r\n") + b"{")
        time.sleep(0.5)
        start = time.monotonic()
        server.send_signal(signal.SIGTERM)
        code = server.wait(120)
    return {
        "exit_code": code,
        "exit_s": round(time.monotonic() - start, 2),
        "tracebacks": log.read_text().count("Traceback"),
    }
