"""Loads a server with good clients next to hostile ones, and then ends it.

    python docs/lab/hostile.py                                          # starts a server
    python docs/lab/hostile.py --url http://localhost --half-open 4000

Hostile clients open connections and send nothing, or single bytes of headers; hold bodies back;
leave during their body; and send bodies that are too large. On this machine they come from other
addresses (127.0.0.2) than the good ones, as the limits per client require. Every good request
should get an answer, and the server should end within its deadline with a request unfinished.

The good clients also ask alone, before and after the hostile ones, so that both durations are of
one server on one machine: other work on the machine, or a drift, affects both.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
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

# Addresses of this machine. Each has separate limits, and a probe must not use up the limits of the
# good clients.
HOSTILE, PROBE = "127.0.0.2", "127.0.0.3"
HEAD = "POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
MIB = 1 << 20
PATIENCE = 300.0  # seconds of a good client: the first batches compile
OPENING = 0.02  # seconds between the bursts in which connections are opened
BURST = 32  # connections


@dataclasses.dataclass(frozen=True)
class ServeWork:
    """The load.

    Fields:
      seconds: duration with hostile clients; good ones ask alone for half of it before and after.
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

    def local_address(self, address: str) -> str | None:
        """Returns an address of this machine if the server is on it too."""
        return address if self.place[0].startswith("127.") else None

    def http(self, address: str | None = None) -> httpx2.AsyncClient:
        """Returns a client, from an address of this machine if the server is on it too."""
        local_address = self.local_address(address) if address else None
        return httpx2.AsyncClient(
            base_url=self.url,
            timeout=PATIENCE,
            headers=self.headers(),
            # Proxies of the environment would hide the server under test.
            trust_env=False,
            transport=httpx2.AsyncHTTPTransport(
                # A new connection per request: the server may close an idle one at any time.
                limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0),
                local_address=local_address,
            ),
        )

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
        self.server_s = 0.0  # processor time of the server

    def quantile(self, percent: float) -> float:
        """A quantile of the seconds of good requests; 0 without any, and the counts show why."""
        return float(np.percentile(self.seconds or [0.0], percent))

    def server_s_per_reply(self) -> float:
        """Processor time of the server per good request, which other work hardly changes."""
        return self.server_s / max(1, len(self.seconds))

    def merge(self, other: Tally) -> Tally:
        """Returns the good requests of two tallies."""
        both = Tally()
        both.good, both.seconds = self.good + other.good, self.seconds + other.seconds
        both.server_s = self.server_s + other.server_s
        return both


def bench_serve(work: ServeWork, target: Target | None = None) -> dict[str, Any]:
    """Loads a server, and returns what its clients saw as values for JSON.

    Args:
      work: the load.
      target: a running server; None starts `ragrl serve` with the tiny C-3PO policy, and
        ends it.

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
    before, during, after = asyncio.run(_load(work, target))
    # Memory that the server allocated with hostile clients stays after they end.
    memory = [max(x.memory) if x.memory else None for x in (before, during)]
    alone = before.merge(after)
    return {
        **dataclasses.asdict(work),
        "good_alone": dict(alone.good),
        "good": dict(during.good),
        "hostile": dict(during.hostile),
        **_compared("p50_s", alone.quantile(50), during.quantile(50)),
        **_compared("p95_s", alone.quantile(95), during.quantile(95)),
        **_compared("max_s", alone.quantile(100), during.quantile(100)),
        **_compared("server_s_per_reply", alone.server_s_per_reply(), during.server_s_per_reply()),
        **_compared("rss_peak_bytes", *memory),
        "health_max_s": round(max(during.health_seconds, default=0.0), 3),
    }


def _compared(name: str, alone: float | None, during: float | None) -> dict[str, float | None]:
    """A quantity with hostile clients, without them, and the ratio; None if it is unknown."""
    ratio = during / alone if alone and during else None
    values = {name: during, f"{name}_alone": alone, f"{name}_ratio": ratio}
    return {key: x if x is None else round(x, 3) for key, x in values.items()}


async def _load(work: ServeWork, target: Target) -> tuple[Tally, Tally, Tally]:
    """Returns what good clients saw before, during and after the load of hostile ones."""
    peaceful = ServeWork(work.seconds / 2, work.clients, half_open=0, held=0, leaving=0, huge=0)
    async with target.http() as http, target.http(PROBE) as probe:
        await _wait_until_ready(http)
        # Two requests of each client, because the first batches compile.
        names = [f"the first {n}" for n in range(work.clients)]
        await asyncio.gather(*(_ask(http, target, Tally(), name, 0.0, 2) for name in names))
        before = await _stretch(http, probe, peaceful, target, "before")
        during = await _stretch(http, probe, work, target, "during")
        return before, during, await _stretch(http, probe, peaceful, target, "after")


async def _stretch(
    http: httpx2.AsyncClient, probe: httpx2.AsyncClient, work: ServeWork, target: Target, name: str
) -> Tally:
    """Loads the server for some time.

    Args:
      http: the connections of the good clients.
      probe: further connections.
      work: the load.
      target: the server.
      name: makes the questions differ between stretches.
    """
    tally = Tally()
    start = await _server_seconds(probe)
    await _probe(probe, tally)
    # Hostile clients run until the good ones have their answers.
    hostile = asyncio.gather(*_hostile(work, target, tally), return_exceptions=True)
    end = time.monotonic() + work.seconds
    good = [_ask(http, target, tally, f"{name} {n}", end) for n in range(work.clients)]
    try:
        await asyncio.gather(*good, _probe_until(probe, tally, end))
    finally:
        hostile.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await hostile
    await _probe(probe, tally)
    tally.server_s = await _server_seconds(probe) - start
    return tally


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
    http: httpx2.AsyncClient, target: Target, tally: Tally, client: str, end: float, least: int = 1
) -> None:
    """One good client: asks until the end, and counts replies by status.

    Args:
      http: the connections to the server.
      target: the server.
      tally: counts and durations.
      client: its name.
      end: the time of `time.monotonic` of its last request.
      least: the least number of requests.
    """
    number = 0
    while number < least or time.monotonic() < end:
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
        if memory := await _metric(http, "process_resident_memory_bytes"):
            tally.memory.append(int(memory))


async def _server_seconds(http: httpx2.AsyncClient) -> float:
    with contextlib.suppress(httpx2.RequestError):
        return await _metric(http, "process_cpu_seconds_total") or 0.0
    return 0.0


async def _metric(http: httpx2.AsyncClient, name: str) -> float | None:
    """A value of `/metrics`; None if the server does not report it."""
    text = (await http.get("/metrics")).text
    line = re.search(rf"^{name} (\S+)", text, re.MULTILINE)
    return float(line[1]) if line else None


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
    address = target.local_address(HOSTILE)
    local = (address, 0) if address else None
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
    arguments = ("serve", "--port", "0", "--drain-deadline", "5")
    command = [sys.executable, "-m", "jax_ragrl", *arguments]
    command.append("--no-api-key")  # the clients of the benchmark send none
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", help="address of a running server (default: starts one)")
    parser.add_argument("--retriever", action="store_true", help="--url serves a retriever")
    fields = {f"--{f.name.replace('_', '-')}": f.default for f in dataclasses.fields(ServeWork)}
    for option, default in fields.items():
        parser.add_argument(option, type=type(default), default=default)
    options = vars(parser.parse_args())
    url, path = options.pop("url"), "/retrieve" if options.pop("retriever") else "/answer"
    target = Target(url, path, os.environ.get("RAGRL_API_KEY", "")) if url else None
    print(json.dumps(bench_serve(ServeWork(**options), target)))


if __name__ == "__main__":
    main()
