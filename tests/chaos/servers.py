"""A language model and a retriever on local sockets that fail a share of their requests.

Their right replies are functions of the request alone, so that runs with and without faults that
were tried again end equal.
"""

import contextlib
import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jax_ragrl.llm.reader import WorldReader
from jax_ragrl.retrieval.base import Retriever
from jax_ragrl.retrieval.kinds import VectorIndex
from jax_ragrl.retrieval.remote import to_document
from jax_ragrl.run.data import load_data
from jax_ragrl.run.index import load_retriever
from jax_ragrl.types import LLMRequest, Message
from tests.chaos.runs import SMALL, Outcome, call, train_command
from tests.faults import answering, whole
from tests.jobs import config_job

Fault = Callable[[bytes], Iterable[bytes | float]]
STALL = 3.0  # seconds; longer than the time-out of the runs


def refusing(status: str, *headers: str) -> Fault:
    return lambda body: [whole(b'{"error": {"message": "no"}}', status, *headers)]


def sending_instead(body: bytes, *headers: str) -> Fault:
    return lambda _: [whole(body, "200 OK", *headers)]


def raw(*pieces: bytes | float) -> Fault:
    return lambda _: pieces


def _both(value: Any) -> bytes:
    """A body with a wrong value for either protocol."""
    return json.dumps({"choices": value, "result": value}).encode()


def _drip(body: bytes) -> Iterable[bytes | float]:
    for i, byte in enumerate(whole(body)):
        yield bytes([byte])
        yield 0.2 if i < STALL / 0.2 else 0.0


# A second try succeeds. More bodies: tests/runtime/test_servers.py and test_any_reply.py.
PASSING: Mapping[str, Fault] = {
    "closes": raw(),
    "drips": _drip,
    "cut status line": raw(b"HTTP/1.1 2"),
    "no HTTP": raw(b"\x16\x03\x01 SSH-2.0\r\n\r\n"),
    "unknown status": raw(b"HTTP/1.1 abc what\r\n\r\n"),
    "cut headers": raw(b"HTTP/1.1 200 OK\r\nContent-Le"),
    "long header": raw(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 300_000 + b"\r\n\r\n"),
    "wrong length": raw(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}"),
    "cut body": lambda body: [whole(body)[: -len(body) // 2]],
    "half the JSON": lambda body: [whole(body[: len(body) // 2])],
    "bad chunks": raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}"),
    "no gzip": sending_instead(b"{}", "Content-Encoding: gzip"),
    "cut gzip": lambda body: [whole(gzip.compress(body)[:-9], "200 OK", "Content-Encoding: gzip")],
    "page": sending_instead(b"<html>Bad gateway</html>", "Content-Type: text/html"),
    **{f"status {code}": refusing(f"{code} X") for code in (429, 500, 503)},
    "retry after 1": refusing("503 X", "Retry-After: 1"),
}
# Valid JSON of another shape, and other replies that a second try would not change.
ODD: dict[str, Fault] = {
    "null": sending_instead(b"null"),
    "odd content": sending_instead(_both([{"message": {"content": [1]}}])),
}
ODD |= {
    f"charset {name}": sending_instead(b"odd", f"Content-Type: text/html; charset={name}")
    for name in ("utf-16", "undefined", "base64", "idna")
}
ODD |= {
    "odd score": sending_instead(
        b'{"result": [[{"document": {"contents": "x"}, "score": 1%s}]]}' % (b"0" * 400)
    )
}
ODD |= {
    "odd page": refusing("404 X", "Content-Type: text/html; charset=utf-16"),
    "no port": refusing("307 X", "Location: http://127.0.0.1:99999999/"),
    "moved": refusing("302 X", "Location: http://127.0.0.1:1/"),
}
ALL = {**PASSING, **ODD}


class Servers:
    """Answers the requests of a run, with faults at random.

    Args:
      folder: for the index of the retriever.
      share: of the requests that fail.
      faults: the kinds of faults.
      seed: of the faults.
      after: number of requests of each server before the first fault.
    """

    def __init__(self, folder, share, faults, seed, after=4) -> None:
        own = ("data.world.size", "data.world.famous_fraction", "index.kind")
        job = config_job("tiny/c3po", {key: SMALL[key] for key in own})
        corpus, _, world = load_data(job.data)
        assert world is not None and isinstance(job.index, VectorIndex)
        self._retriever: Retriever = load_retriever(corpus, job.index, folder)
        self._reader = WorldReader(world)
        self._share, self._faults, self._seed, self._after = share, faults, seed, after
        self.counts: dict[str, int] = {}

    def complete(self, number: int, body: bytes) -> Iterable[bytes | float]:
        prompt = json.loads(body)["messages"][-1]["content"]
        purpose = "roadmap" if prompt.startswith("plan") else "answer"
        (text,) = self._reader.complete([LLMRequest(purpose, (Message("user", prompt),))])
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return self._pieces("llm", number, {"choices": [choice]})

    def search(self, number: int, body: bytes) -> Iterable[bytes | float]:
        request = json.loads(body)
        hits = self._retriever.search(request["queries"], request["topk"])
        result = [
            [
                {"document": to_document(p), "score": score}
                for p, score in zip(own.passages, own.scores, strict=True)
            ]
            for own in hits
        ]
        return self._pieces("search", number, {"result": result})

    def _pieces(self, server: str, number: int, value: Any) -> Iterable[bytes | float]:
        rng, body = random.Random(f"{self._seed} {server} {number}"), json.dumps(value).encode()
        if number < self._after or rng.random() >= self._share:
            return [whole(body)]
        kind = rng.choice(self._faults)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        return ALL[kind](body)


@contextlib.contextmanager
def served(servers: Servers) -> Iterator[dict[str, Any]]:
    """Yields the config keys of a run that asks these servers."""
    with answering(servers.complete) as (llm, _), answering(servers.search) as (search, _):
        yield {
            "llm__kind": "openai",
            "llm__model": "m",
            "llm__base_url": f"{llm}/v1",
            "llm__timeout": 1.0,
            "index__kind": "remote",
            "index__url": search,
            "index__timeout": 1.0,
        }


def train_on(servers, workdir, policy, **changes) -> Outcome:
    with served(servers) as addresses:
        return call(train_command(workdir, policy, **changes, **addresses), workdir)
