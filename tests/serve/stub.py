"""A retriever without an index, and servers of it that other threads run."""

import contextlib
import importlib
import json
import pathlib
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax_ragrl.serve.access import SETTINGS, Settings
from jax_ragrl.serve.http import make_server
from jax_ragrl.serve.search import LIMITS, application
from jax_ragrl.types import Hits, Passage
from tests.listening import running

# The load with hostile clients is a script of the documentation.
sys.path.append(str(pathlib.Path(__file__).parents[2] / "docs" / "lab"))
hostile = importlib.import_module("hostile")


class Echo:
    """A retriever whose passages have the query as their title, after `seconds`."""

    fingerprint = "echo"

    def __init__(self, seconds: float = 0.0, text: str = "x") -> None:
        self.seconds, self.text, self.queries = seconds, text, []

    def search(self, queries: Sequence[str], k: int) -> list[Any]:
        self.queries += queries
        time.sleep(self.seconds)
        passages = [[Passage(f"{n}", query, self.text) for n in range(k)] for query in queries]
        return [Hits(tuple(hits), (1.0,) * k) for hits in passages]


@contextlib.contextmanager
def serving(
    retriever: Any, settings: Settings = SETTINGS, seconds: float | None = None
) -> Iterator[tuple[int, Any]]:
    """Yields the port and the server of a retriever; `seconds` is the deadline of a request."""
    app = application(retriever, limits=LIMITS._replace(seconds=seconds), settings=settings)
    server = make_server(app, settings)
    with running(server) as port:
        wait_until(lambda: server.started)
        yield port, server


def wait_until(condition: Callable[[], Any]) -> None:
    """Waits for a condition, with a time limit for broken tests."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition is still false after a minute"
        time.sleep(0.01)


def accepts(port: int) -> bool:
    """Whether something listens at a port."""
    with contextlib.suppress(OSError):
        connect(port).close()
        return True
    return False


def connect(port: int, text: bytes = b"") -> socket.socket:
    """A connection on which `text` was sent."""
    connection = socket.create_connection(("127.0.0.1", port), 30)
    connection.sendall(text)
    return connection


def request(body: bytes, length: int | None = None, path: str = "/retrieve") -> bytes:
    """The bytes of a request; `length` is that of its body, of which `body` may be a part."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    size = len(body) if length is None else length
    return f"{head}Content-Length: {size}\r\n\r\n".encode() + body


def search(query: str, k: int = 1) -> bytes:
    """The bytes of a request for passages."""
    return request(json.dumps({"queries": [query], "topk": k}).encode())


def status(connection: socket.socket) -> int:
    """The status of the next reply; 0 if the connection ends without one."""
    try:
        line = connection.recv(12)
    except ConnectionError:
        return 0
    return int(line.split()[1]) if line else 0
