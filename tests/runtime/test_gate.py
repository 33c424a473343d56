"""Requests in flight follow what the server copes with."""

import asyncio
import time

from jax_ragrl.runtime.gate import START, Gate


def test_prompt_replies_raise_the_limit_and_late_ones_do_not():
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


def test_requests_that_fail_together_halve_the_limit_once():
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
