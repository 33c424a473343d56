"""Chat completions in the form of OpenAI's API, complete or as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from starlette.exceptions import HTTPException

from jax_ragrl.serve.bodies import excerpt, parse_flag, parse_question
from jax_ragrl.serve.replies import Answer


def parse_chat_request(body: dict[str, Any]) -> tuple[str, bool, bool]:
    """The last user message, whether events are wanted, and numbers of tokens among them."""
    stream = parse_flag(body, "stream")
    options = body.get("stream_options")
    if options is not None and not (isinstance(options, dict) and stream):
        message = f"stream_options is {excerpt(options)}: give an object, and stream as true"
        raise HTTPException(400, message)
    if body.get("n", 1) not in (1, None):
        message = f"n is {excerpt(body['n'])}, but there is one answer per question: leave n out"
        raise HTTPException(400, message)
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        message = f"messages is {excerpt(messages)}: give a list of objects with role and content"
        raise HTTPException(400, message)
    contents = [message.get("content") for message in messages if message.get("role") == "user"]
    if not contents:
        raise HTTPException(400, "no message has the role user: add one with the question")
    text = contents[-1]
    parts = [x for x in text if isinstance(x, dict)] if isinstance(text, list) else []
    texts = [x.get("text") for x in parts if x.get("type") == "text"]
    if parts and len(texts) == len(text) and all(isinstance(x, str) for x in texts):
        text = "".join(map(str, texts))
    question = parse_question(text, "the content of the last user message")
    return question, stream, parse_flag(options or {}, "include_usage")


def completion(model: str, answer: Answer) -> dict[str, Any]:
    """Returns a chat completion; `why` next to its message is the reason for its end."""
    message = {"role": "assistant", "content": answer.answer or ""}
    choice = {"index": 0, "message": message, **_end(answer)}
    return _head(model, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}


def events(model: str, answer: Answer, with_usage: bool) -> Iterator[str]:
    """Yields a completion as server-sent events: the answer, its end, and tokens if wanted."""
    head = _head(model, "chat.completion.chunk")
    usage: dict[str, Any] = {"usage": None} if with_usage else {}
    first = {"delta": {"role": "assistant", "content": answer.answer or ""}, "finish_reason": None}
    last = {"delta": {}, **_end(answer)}
    parts = [{"choices": [{"index": 0, **choice}], **usage} for choice in (first, last)]
    if with_usage:
        parts.append({"choices": [], "usage": _usage(answer)})
    for part in parts:
        yield f"data: {json.dumps(head | part)}\n\n"
    yield "data: [DONE]\n\n"


def _end(answer: Answer) -> dict[str, str]:
    # The API knows few reasons; `why` is this system's. "stop" would make the empty text of a
    # question without an answer a complete reply.
    reason = "length" if answer.answer is None else "stop"
    return {"finish_reason": reason, "why": answer.finish_reason}


def _head(model: str, kind: str) -> dict[str, Any]:
    now = time.time_ns()
    return {"id": f"chatcmpl-{now:x}", "object": kind, "created": now // 10**9, "model": model}


def _usage(answer: Answer) -> dict[str, int]:
    """Tokens of the question and the answer: the rollout between them is not part of the API."""
    prompt, reply = answer.tokens
    return {"prompt_tokens": prompt, "completion_tokens": reply, "total_tokens": prompt + reply}
