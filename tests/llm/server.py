"""A small OpenAI-compatible server in a thread, for tests."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.faults import answering, whole

Reply = Callable[[Mapping[str, Any]], str | int | bytes]


def echo(body: Mapping[str, Any]) -> str:
    """The first line of the prompt."""
    return body["messages"][-1]["content"].partition("\n")[0]


@contextlib.contextmanager
def serving(reply: Reply = echo) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The address to give as `base_url`, and the requests so far.

    `reply` maps a request to the text of its answer, to an HTTP status that refuses it, or to bytes
    that are sent as they are.
    """
    seen: list[Mapping[str, Any]] = []

    def answer(number: int, data: bytes) -> list[bytes | float]:
        body = json.loads(data)
        seen.append(body)
        said, status = reply(body), "200 OK"
        if isinstance(said, int):
            status, said = f"{said} X", b'{"error": {"message": "refused"}}'
        elif isinstance(said, str):
            said = json.dumps(completion(body, said)).encode()
        return [whole(said, status, "Content-Type: application/json")]

    with answering(answer) as (address, _):
        yield f"{address}/v1", seen


def completion(body: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """A chat completion as servers write it."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
    return {**head, "choices": [choice], "usage": usage}
