"""Chat completions in the form of OpenAI's API, complete or as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax_ragrl.serve.bodies import bad_request, excerpt, parse_flag, parse_question
from jax_ragrl.serve.replies import Answer

EVENTS = "text/event-stream"
DONE = "data: [DONE]\n\n"


class ChatRequest(NamedTuple):
    """A chat request.

    Fields:
      text: the last user message.
      stream: whether the reply is a sequence of events.
      with_usage: whether the last event has the numbers of tokens.
    """

    text: str
    stream: bool
    with_usage: bool


def parse_chat_request(body: dict[str, Any]) -> ChatRequest:
    """Parses a chat request, whose last user message may be a list of text parts."""
    stream = body.get("stream") is not None and parse_flag(body, "stream")
    with_usage = _parse_stream_options(body.get("stream_options"), stream)
    if body.get("n", 1) not in (1, None):
        raise bad_request(
            f"n is {excerpt(body['n'])}, but there is one answer per question: leave n out"
        )
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise bad_request(
            f"messages is {excerpt(messages)}: give a list of objects with role and content"
        )
    contents = [message.get("content") for message in messages if message.get("role") == "user"]
    if not contents:
        raise bad_request("no message has the role user: the last such message is the question")
    name = "the content of the last user message"
    return ChatRequest(parse_question(_join_text_parts(contents[-1]), name), stream, with_usage)


def _parse_stream_options(options: Any, stream: bool) -> bool:
    """Whether the numbers of tokens are wanted; OpenAI allows the options with `stream` only."""
    if options is None:
        return False
    if not isinstance(options, dict) or not stream:
        raise bad_request(
            f"stream_options is {excerpt(options)}: give an object, and stream as true"
        )
    return parse_flag(options, "include_usage")


def _join_text_parts(content: Any) -> Any:
    """A list of text parts as one text; any other content unchanged."""
    parts = content if isinstance(content, list) else []
    texts = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"]
    is_text = len(texts) == len(parts) and all(isinstance(t, str) for t in texts)
    return "".join(map(str, texts)) if parts and is_text else content


def completion(model: str, answer: Answer) -> dict[str, Any]:
    """Returns a chat completion; `why` next to its message is the reason for its end."""
    message = {"role": "assistant", "content": answer.answer or ""}
    choice = {"index": 0, "message": message, **_end(answer)}
    return _head(model, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def events(model: str, answer: Answer, with_usage: bool) -> Iterator[str]:
    """Yields a completion as server-sent events; one event holds the whole answer.

    Args:
      model: name of the served model.
      answer: the answer.
      with_usage: whether a last event has the numbers of tokens.
    """
    head = _head(model, "chat.completion.chunk")
    usage: dict[str, Any] = {"usage": None} if with_usage else {}
    delta = {"role": "assistant", "content": answer.answer or ""}
    for choice in (
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, **_end(answer)},
    ):
        yield _event(head | {"choices": [choice]} | usage)
    if with_usage:
        yield _event(head | {"choices": [], "usage": _usage(answer)})
    yield DONE


def _head(model: str, kind: str) -> dict[str, Any]:
    now = time.time_ns()
    return {"id": f"chatcmpl-{now:x}", "object": kind, "created": now // 10**9, "model": model}


def _end(answer: Answer) -> dict[str, str]:
    # The API knows few reasons; `why` is this system's.
    return {"finish_reason": "stop", "why": answer.finish_reason}


def _usage(answer: Answer) -> dict[str, int]:
    """Tokens of the question and the answer: the rollout between them is not part of the API."""
    prompt, reply = answer.tokens
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}


def _event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"
