"""Request bodies: parsing, validation, and the messages of refused requests."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

MAX_BYTES = 1 << 24  # per request
MAX_CHARACTERS = 1 << 13  # per question
MAX_QUERIES = 1 << 12  # per request
MAX_TOP_K = 1000  # passages per query
MAX_PASSAGES = 1 << 18  # per reply


def bad_request(message: str, status: int = 400) -> HTTPException:
    """The exception that refuses a request."""
    return HTTPException(status, message)


async def read_json(request: Request) -> dict[str, Any]:
    """Reads the JSON object of a request."""
    data = bytearray()
    # In parts, so that a request that is too large is refused before it is read completely.
    async for part in request.stream():
        data += part
        if len(data) > MAX_BYTES:
            raise bad_request(
                f"the request has more than {MAX_BYTES} bytes: send less at once", 413
            )
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise bad_request(
            f'the request is not JSON ({error}): send an object such as {{"question": "..."}}'
        ) from error
    if not isinstance(body, dict):
        raise bad_request(f"the request is {excerpt(body)}: send a JSON object")
    return body


def excerpt(value: Any) -> str:
    """The first characters of a value, for a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def parse_question(text: Any, name: str = "question") -> str:
    """Validates the text of a question in the field `name`."""
    if not isinstance(text, str) or not text.strip():
        raise bad_request(f"{name} is {excerpt(text)}: give a text that is not blank")
    if len(text) > MAX_CHARACTERS:
        raise bad_request(f"{name} has {len(text)} characters: give {MAX_CHARACTERS} at most", 413)
    # Lone surrogates are valid JSON but cannot be encoded in UTF-8.
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise bad_request(
            f"{name} is {excerpt(text)}, half a surrogate pair: send whole characters"
        )
    return text


def parse_questions(body: dict[str, Any], name: str, limit: int) -> list[str]:
    """Validates a list of questions.

    Args:
      body: the request.
      name: field of the list.
      limit: max number of questions.
    """
    texts = body.get(name)
    if not isinstance(texts, list) or not texts:
        raise bad_request(f"{name} is {excerpt(texts)}: give a list of texts")
    if len(texts) > limit:
        raise bad_request(f"{name} holds {len(texts)} texts: give {limit} at most", 413)
    return [parse_question(text, f"{name}[{i}]") for i, text in enumerate(texts)]


def parse_answer_request(body: dict[str, Any], limit: int) -> tuple[list[str], bool]:
    """The questions of a request (`limit` at most), and whether the reply includes steps."""
    unknown = sorted(body.keys() - {"question", "questions", "trace"})
    if unknown or ("question" in body) == ("questions" in body):
        raise bad_request(
            f"the request has the fields {excerpt(sorted(body))}: give either question or "
            "questions, and optionally trace"
        )
    trace = body.get("trace", False)
    if not isinstance(trace, bool):
        raise bad_request(f"trace is {excerpt(trace)}: give true or false")
    if "question" in body:
        return [parse_question(body["question"])], trace
    return parse_questions(body, "questions", limit), trace


def parse_search_request(body: dict[str, Any], top_k: int) -> tuple[list[tuple[str, int]], bool]:
    """The queries of a request, each with its number of passages, and whether scores are wanted.

    A query may be any text: the queries of a policy are never refused. `top_k` is the default
    number of passages.
    """
    queries, k = body.get("queries"), body.get("topk")
    with_scores = body.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise bad_request(f"queries is {excerpt(queries)}: give a list of texts")
    if len(queries) > MAX_QUERIES:
        raise bad_request(f"queries holds {len(queries)} texts: give {MAX_QUERIES} at most", 413)
    k = top_k if k is None else k
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_TOP_K:
        raise bad_request(f"topk is {excerpt(k)}: give a number from 1 to {MAX_TOP_K}")
    if len(queries) * k > MAX_PASSAGES:
        raise bad_request(
            f"{len(queries)} queries with topk {k} request too many passages: request "
            f"{MAX_PASSAGES} at most",
            413,
        )
    if not isinstance(with_scores, bool):
        raise bad_request(f"return_scores is {excerpt(with_scores)}: give true or false")
    return [(query, k) for query in queries], with_scores


def parse_chat_request(body: dict[str, Any]) -> str:
    """The last user message of a chat request, which may be a list of text parts."""
    if body.get("stream"):
        raise bad_request("stream is true, but answers are not streamed: leave stream out")
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
    return parse_question(_join_text_parts(contents[-1]), "the content of the last user message")


def _join_text_parts(content: Any) -> Any:
    """A list of text parts as one text; any other content unchanged."""
    parts = content if isinstance(content, list) else []
    texts = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"]
    is_text = len(texts) == len(parts) and all(isinstance(t, str) for t in texts)
    return "".join(map(str, texts)) if parts and is_text else content
