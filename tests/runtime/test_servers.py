"""Every client has a deadline, a limit of size, pauses that its server may choose, and a gate."""

import asyncio
import datetime
import email.utils
import gzip
import itertools
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from jax_ragrl.errors import EffectError
from jax_ragrl.llm.openai import OpenAILLM
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.retrieval.web import WebRetriever
from jax_ragrl.runtime import servers
from jax_ragrl.runtime.gate import START, Gate
from jax_ragrl.runtime.servers import (
    BoundedClient,
    Tries,
    TryFailed,
    retry_after,
    take_counts,
    wait_for,
)
from jax_ragrl.types import LLMRequest, Message
from tests.faults import sending, whole

CLIENTS = ("llm", "retriever", "web")


def answers(client: str, address: str, queries: str, k: int, **settings: Any) -> list[Any]:
    """The outcomes of requests of a client, each with one letter of `queries`."""
    if client == "llm":
        llm = OpenAILLM("m", f"{address}/v1", **settings)
        return [*llm.complete([LLMRequest("answer", (Message("user", q),)) for q in queries])]
    if client == "retriever":
        return [*RemoteRetriever(address, pause=0.01, **settings).search([*queries], k)]
    return [*WebRetriever("serper", address, pause=0.01, **settings).search([*queries], k)]


def ask(client: str, address: str, **settings: Any) -> Any:
    return answers(client, address, "q", 1, **settings)[0]


GOOD = {
    "llm": {"choices": [{"message": {"role": "assistant", "content": "Ulm"}}]},
    "retriever": {"result": [[{"document": {"id": 1, "contents": "t\nx"}, "score": 1.0}]]},
    "web": {"organic": [{"title": "t", "link": "http://x", "snippet": "s"}]},
}


def drip(number: int) -> Iterator[bytes | float]:
    """A body whose bytes come one by one, each soon enough for a time-out between bytes."""
    yield whole(b" " * 100)[:-100]
    for _ in range(100):
        yield from (b" ", 0.1)


def drip_headers(number: int) -> Iterator[bytes | float]:
    yield b"HTTP/1.1 200 OK\r\nX: "
    for _ in range(100):
        yield from (b"x", 0.1)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("pieces", [drip, drip_headers])
def test_a_server_that_drips_bytes_holds_no_request(client, pieces):
    with sending(pieces) as (address, times):
        start = time.monotonic()
        outcome = ask(client, address, timeout=0.3, retries=0)
        assert time.monotonic() - start < 3  # the drip lasts for ten seconds
    assert isinstance(outcome, EffectError) and "within 0.3 s" in str(outcome) and len(times) == 1


@pytest.mark.parametrize("status", ["200 OK", "400 Bad Request", "500 Wrong"])
def test_a_huge_body_is_not_read(status, monkeypatch):
    monkeypatch.setattr(servers, "MAX_BODY", 1 << 16)
    bomb = gzip.compress(bytes(1 << 22))  # small on the wire
    for body, headers in ((bytes(1 << 20), ()), (bomb, ("Content-Encoding: gzip",))):
        with sending(lambda number, b=body, h=headers: [whole(b, status, *h)]) as (address, _):
            client = BoundedClient(5.0, 1 << 16)
            with pytest.raises(httpx2.RemoteProtocolError, match="larger than 65536 bytes"):
                wait_for(client.post(address, content="x"))


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    "body",
    [b'{"choices": [', b"<html>", b'{"x": "\xff"}', b"[" * 100_000, b"", b"{}", b'{"result": []}'],
)
def test_rubbish_with_status_200_is_tried_again(client, body, monkeypatch):
    monkeypatch.setattr("jax_ragrl.llm.openai.PAUSE", 0.01)
    good = json.dumps(GOOD[client]).encode()
    with sending(lambda number: [whole(body if number < 2 else good)]) as (address, times):
        assert not isinstance(ask(client, address, retries=2), EffectError) and len(times) == 3


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_waits_as_its_server_asks(client):
    replies = [whole(b"", "429 Busy", "Retry-After: 0.5"), whole(json.dumps(GOOD[client]).encode())]
    with sending(lambda number: [replies[number]]) as (address, times):
        take_counts()
        assert not isinstance(ask(client, address, retries=1), EffectError)
    assert take_counts() == {"server_retries": 1}
    assert times[1] - times[0] >= 0.5


def test_a_pause_is_in_seconds_or_until_a_date_and_capped(monkeypatch):
    def read(value: str) -> float | None:
        return retry_after({"retry-after": value})

    assert read("3") == 3.0 and read("0.5") == 0.5 and read("-1") == 0.0
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    seconds = read(email.utils.format_datetime(later, usegmt=True))
    assert seconds is not None and 28 <= seconds <= 30
    assert read("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert [read(x) for x in ("", "nan", "inf", "soon", "99 Foo 20156 99:99")] == [None] * 5
    assert retry_after({}) is None
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def attempt(patience: float) -> None:
        raise TryFailed("busy", 1e9)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(TryFailed):
        wait_for(Tries(2, 0.5).ask(attempt))
    assert pauses == [servers.MAX_PAUSE] * 2


def outcomes(tries: Tries, attempt, number: int) -> list[str]:
    """The outcomes of concurrent requests."""

    async def one() -> str:
        try:
            await tries.ask(attempt)
        except (TryFailed, EffectError) as error:
            return type(error).__name__
        return "good"

    async def every() -> list[str]:
        return list(await asyncio.gather(*(one() for _ in range(number))))

    return wait_for(every())


def test_a_server_that_fails_gets_one_request_at_a_time():
    is_down, sent = True, itertools.count()

    async def attempt(patience: float) -> None:
        next(sent)
        await asyncio.sleep(0.001)
        if is_down:
            raise TryFailed("down")

    tries = Tries(0, 0.01)
    take_counts()
    assert outcomes(tries, attempt, servers.FAILURES) == ["TryFailed"] * servers.FAILURES
    # One request of many is sent, and the others share its fate.
    assert outcomes(tries, attempt, 64) == ["TryFailed"] + ["UnavailableError"] * 63
    assert next(sent) == servers.FAILURES + 1 and take_counts() == {"server_skipped": 63}
    is_down = False
    assert outcomes(tries, attempt, 64) == ["good"] * 64
    is_down = True
    assert outcomes(tries, attempt, 7) == ["TryFailed"] * 7  # a success begins to count anew


def test_a_refused_request_is_no_failure_of_the_server():
    refusals = iter([True] * 20)

    async def attempt(patience: float) -> None:
        if next(refusals, False):
            raise ValueError("status 400")

    tries = Tries(0, 0.01)
    for _ in range(20):
        with pytest.raises(ValueError, match="400"):
            wait_for(tries.ask(attempt))
    assert outcomes(tries, attempt, 9) == ["good"] * 9 and "server_skipped" not in take_counts()


def test_a_caller_may_have_an_event_loop():
    async def call() -> object:
        good = json.dumps(GOOD["llm"]).encode()
        with sending(lambda number: [whole(good)]) as (address, _):
            return ask("llm", address)

    assert asyncio.run(call()) == "Ulm"


def test_threads_share_one_loop_from_the_first_request_on(monkeypatch):
    """Connections belong to a loop, and the first requests of a rollout come at once."""
    servers._loop.cache_clear()
    new = asyncio.new_event_loop

    def new_event_loop() -> asyncio.AbstractEventLoop:
        time.sleep(0.05)  # so that all threads ask before there is a loop
        return new()

    async def own_loop() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    monkeypatch.setattr(servers.asyncio, "new_event_loop", new_event_loop)
    with ThreadPoolExecutor(8) as pool:
        loops = list(pool.map(lambda _: wait_for(own_loop()), range(8)))
    assert len({*loops}) == 1


def test_prompt_replies_raise_the_limit_and_failures_together_halve_it_once():
    gate = Gate(64, timeout=40)
    now = time.monotonic()
    for _ in range(10):
        gate.count_reply(now - 11)
    assert gate.limit == START == 4
    for _ in range(10):
        gate.count_reply(now - 9)
    assert gate.limit == 14
    for _ in range(100):
        gate.count_reply(now)
    assert gate.limit == 64
    gate, sent_together = Gate(256, timeout=60), time.monotonic()
    gate.limit = 32.0
    for _ in range(32):
        gate.count_overload(sent_together)
    assert gate.limit == 16
    for _ in range(16):
        gate.count_reply(time.monotonic())
    assert 16.9 < gate.limit < 17
    for _ in range(10):
        gate.count_overload(time.monotonic() + 1e-6)
        time.sleep(1e-4)
    assert gate.limit == 1


def test_never_more_requests_than_the_limit_are_in_flight_and_all_of_them_run():
    async def run() -> tuple[list[int], int]:
        gate, inside, counts = Gate(256, timeout=60), 0, list[int]()

        async def request(number: int) -> None:
            nonlocal inside
            async with gate.slot(number):
                inside += 1
                assert inside <= most
                counts.append(inside)
                await asyncio.sleep(0.001)
                inside -= 1
                if number % 50 == 0:
                    gate.count_overload(time.monotonic())
                else:
                    gate.count_reply(time.monotonic())

        most = 256
        await asyncio.wait_for(asyncio.gather(*(request(n) for n in range(400))), 30)
        return counts, gate.limit

    counts, limit = asyncio.run(run())
    assert len(counts) == 400 and max(counts[:START]) == START and 1 <= limit <= 256


def test_the_request_that_began_first_is_the_next_and_a_canceled_one_holds_no_place():
    async def run() -> list[int]:
        gate, order = Gate(1, timeout=60), list[int]()

        async def request(rank: int) -> None:
            async with gate.slot(rank):
                order.append(rank)
                await asyncio.sleep(0.01)

        tasks = []
        for rank in (5, 4, 9, 2, 7):
            tasks.append(asyncio.create_task(request(rank)))
            await asyncio.sleep(0)
        tasks[1].cancel()  # it waits
        tasks[0].cancel()  # it is in flight
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        return order

    assert asyncio.run(run()) == [5, 2, 7, 9]
