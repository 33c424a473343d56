"""Request bodies: parsing, validation, and the messages of refused requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

MAX_BYTES = 1 << 22  # per request
MAX_MARKS = 1 << 17  # commas, colons and brackets per request
MAX_CHARACTERS = 1 << 13  # per question
MAX_QUERIES = 1 << 12  # per request
MAX_TOP_K = 1000  # passages per query
MAX_PASSAGES = 1 << 18  # per reply


def refuse(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Returns the reply of a refusal, in the form of OpenAI's errors."""
    return JSONResponse({"error": {"message": message, "code": status}}, status, headers)


async def read_json(request: Request) -> dict[str, Any]:
    """Reads the JSON object of a request."""
    # A form of a web page can send any text, but cannot send this type.
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        message = f"the content type is {kind[:60]!r}: send 'Content-Type: application/json'"
        raise HTTPException(415, message)
    data = bytearray()
    async for part in request.stream():
        data += part
        # Counted while the body arrives, since a header may name any size.
        if len(data) > MAX_BYTES:
            message = f"the request has more than {MAX_BYTES} bytes: send less at once"
            raise HTTPException(413, message)
    # The parser holds the interpreter's lock: no thread can run meanwhile, not even the event
    # loop. Its time grows with the number of values, which these marks separate.
    if sum(map(data.count, b",:[{")) > MAX_MARKS:
        message = f"the request has more than {MAX_MARKS} commas, colons and brackets"
        raise HTTPException(413, f"{message}: send less at once")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        message = f'the request is not JSON ({error}): send an object such as {{"question": "..."}}'
        raise HTTPException(400, message) from error
    if not isinstance(body, dict):
        raise HTTPException(400, f"the request is {excerpt(body)}: send a JSON object")
    return body


def excerpt(value: Any) -> str:
    """The first characters of a value, for a message."""
    try:
        text = json.dumps(value[:60] if isinstance(value, list | str) else value)
    except RecursionError:  # the encoder has a lower limit than the parser
        text = "a value of too many levels"
    return text if len(text) <= 60 else f"{text[:60]}..."


def parse_question(text: Any, name: str = "question") -> str:
    """Validates the text of a question in the field `name`."""
    if not isinstance(text, str) or not text.strip():
        raise HTTPException(400, f"{name} is {excerpt(text)}: give a text that is not blank")
    if len(text) > MAX_CHARACTERS:
        message = f"{name} has {len(text)} characters: give {MAX_CHARACTERS} at most"
        raise HTTPException(413, message)
    # Lone surrogates are valid JSON but cannot be encoded in UTF-8.
    if any("\ud800" <= c <= "\udfff" for c in text):
        message = f"{name} is {excerpt(text)}, half a surrogate pair: send whole characters"
        raise HTTPException(400, message)
    return text


def parse_answer_request(body: dict[str, Any], limit: int) -> tuple[list[str], bool, bool]:
    """The questions of a request (`limit` at most), and whether the reply has steps, passages."""
    unknown = body.keys() - {"question", "questions", "trace", "passages"}
    if unknown or ("question" in body) == ("questions" in body):
        remedy = "give either question or questions, and optionally trace and passages"
        raise HTTPException(400, f"the request has the fields {excerpt(sorted(body))}: {remedy}")
    trace, passages = parse_flag(body, "trace"), parse_flag(body, "passages")
    if "question" in body:
        return [parse_question(body["question"])], trace, passages
    texts = body["questions"]
    if not isinstance(texts, list) or not texts:
        raise HTTPException(400, f"questions is {excerpt(texts)}: give a list of texts")
    if len(texts) > limit:
        raise HTTPException(413, f"questions holds {len(texts)} texts: give {limit} at most")
    questions = [parse_question(text, f"questions[{i}]") for i, text in enumerate(texts)]
    return questions, trace, passages


def parse_flag(body: dict[str, Any], name: str) -> bool:
    """Validates a field that is true or false; false if it is absent or null."""
    flag = body.get(name)
    if not isinstance(flag, bool | None):
        raise HTTPException(400, f"{name} is {excerpt(flag)}: give true or false")
    return bool(flag)


def parse_search_request(
    body: dict[str, Any], top_k: int, limit: int
) -> tuple[list[tuple[str, int]], bool]:
    """The queries of a request, each with its number of passages, and whether scores are wanted.

    A query may be any text: the queries of a policy are never refused.
    """
    # Another name of `topk` would be left out, and the reply have a wrong number of passages.
    if body.keys() - {"queries", "topk", "return_scores"}:
        remedy = "give queries, and optionally topk and return_scores"
        raise HTTPException(400, f"the request has the fields {excerpt(sorted(body))}: {remedy}")
    queries, k = body.get("queries"), body.get("topk")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise HTTPException(400, f"queries is {excerpt(queries)}: give a list of texts")
    if len(queries) > limit:
        raise HTTPException(413, f"queries holds {len(queries)} texts: give {limit} at most")
    k = top_k if k is None else k
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_TOP_K:
        raise HTTPException(400, f"topk is {excerpt(k)}: give a number from 1 to {MAX_TOP_K}")
    if len(queries) * k > MAX_PASSAGES:
        message = f"{len(queries)} queries with topk {k} request too many passages"
        raise HTTPException(413, f"{message}: request {MAX_PASSAGES} at most")
    return [(query, k) for query in queries], parse_flag(body, "return_scores")
