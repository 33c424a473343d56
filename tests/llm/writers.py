"""Processes that write a cache of replies; they import no JAX, so that they start fast."""

import pathlib

from jax_ragrl.llm.cache import ReplyCache
from jax_ragrl.types import LLMRequest, Message

ROWS = 200


def write(file: pathlib.Path, writer: int, started: object) -> None:
    cache, number = ReplyCache(file), 0
    while number < ROWS or writer == 0:  # the first writer is killed
        cache.put(b"%d-%d" % (writer, number % 10_000), f"reply {writer} {number}", {})
        cache.put(b"common %d" % number, f"common {number}", {})
        number += 1
        if number == 20:
            started.set()  # type: ignore[attr-defined]


def complete(file: pathlib.Path, address: str) -> None:
    """Asks nine questions, one after the other."""
    from jax_ragrl.llm.openai import OpenAILLM

    requests = [LLMRequest("answer", (Message("user", f"q{i}"),)) for i in range(9)]
    OpenAILLM("m", address, concurrency=1, cache=file).complete(requests)
