"""The check of a chat completion: everything that a server may send is text or one `ValueError`."""

from __future__ import annotations

from typing import Any

from jax_ragrl.json_text import loads
from jax_ragrl.llm.base import MeteredReply

MAX_TOKENS = 1 << 30  # of one reply, as a server may report them


def read_completion(body: bytes) -> str:
    """Returns the text of a chat completion, with the token counts that its server reports.

    A list of text parts (OpenAI's other form of content) is joined. Content of null is empty: all
    tokens may have been spent on reasoning. Impossible counts are treated as missing.

    Raises:
      ValueError: the body is not a chat completion; the message names the fault.
    """
    value = loads(body)
    choices = value.get("choices") if isinstance(value, dict) else None
    if not isinstance(choices, list) or not choices:
        raise ValueError("it has no list of choices")
    message = choices[0].get("message") if isinstance(choices[0], dict) else None
    if not isinstance(message, dict) or "content" not in message:
        raise ValueError("its first choice has no message with content")
    text, usage = _text(message["content"]), value.get("usage")
    # The token counts that the server bills, if it reports them.
    usage = usage if isinstance(usage, dict) else {}
    counts: list[Any] = [usage.get(f"{kind}_tokens") for kind in ("prompt", "completion")]
    if not all(type(count) is int and 0 <= count <= MAX_TOKENS for count in counts):
        return text
    return MeteredReply(text, *counts)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    if any(not isinstance(text, str) for text in texts):
        raise ValueError(f"its content is of type {type(content).__name__}, and not text")
    return "".join(map(str, texts))
