"""Request bodies: parsing, validation, and the messages of refused requests."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from jax_ragrl.serve.intake import MAX_BYTES as MAX_BYTES

MAX_MARKS = 1 << 17  # commas, colons and brackets per request
MAX_CHARACTERS = 1 << 13  # per question
MAX_QUERIES = 1 << 12  # per request
MAX_TOP_K = 1000  # passages per query
MAX_PASSAGES = 1 << 18  # per reply


def bad_request(message: str, status: int = 400) -> HTTPException:
    """The exception that refuses a request."""
    return HTTPException(status, message)


async def read_json(request: Request) -> dict[str, Any]:
    """Reads the JSON object of a request."""
    data = await request.body()
    # The parser holds the interpreter's lock: no thread can run meanwhile, not even the event
    # loop. Its time grows with the number of values, which these marks separate.
    if sum(map(data.count, b",:[{")) > MAX_MARKS:
        raise bad_request(
            f"the request has more than {MAX_MARKS} commas, colons and brackets: send less at once",
            413,
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
    text = json.dumps(value[:60] if isinstance(value, list | str) else value)
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


class AnswerRequest(NamedTuple):
    """The questions of a request, and the parts of its reply in addition to the answers."""

    texts: list[str]
    trace: bool
    passages: bool


def parse_answer_request(body: dict[str, Any], limit: int) -> AnswerRequest:
    """The questions of a request (`limit` at most), and whether the reply has steps, passages."""
    unknown = sorted(body.keys() - {"question", "questions", "trace", "passages"})
    if unknown or ("question" in body) == ("questions" in body):
        raise bad_request(
            f"the request has the fields {excerpt(sorted(body))}: give either question or "
            "questions, and optionally trace and passages"
        )
    trace, passages = parse_flag(body, "trace"), parse_flag(body, "passages")
    if "question" in body:
        return AnswerRequest([parse_question(body["question"])], trace, passages)
    return AnswerRequest(parse_questions(body, "questions", limit), trace, passages)


def parse_flag(body: dict[str, Any], name: str) -> bool:
    """Validates a field that is true or false; false if it is absent."""
    flag = body.get(name, False)
    if not isinstance(flag, bool):
        raise bad_request(f"{name} is {excerpt(flag)}: give true or false")
    return flag


def parse_search_request(
    body: dict[str, Any], top_k: int, limit: int
) -> tuple[list[tuple[str, int]], bool]:
    """The queries of a request, each with its number of passages, and whether scores are wanted.

    A query may be any text: the queries of a policy are never refused.

    Args:
      body: the request.
      top_k: the default number of passages.
      limit: max number of queries.
    """
    queries, k = body.get("queries"), body.get("topk")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise bad_request(f"queries is {excerpt(queries)}: give a list of texts")
    if len(queries) > limit:
        raise bad_request(f"queries holds {len(queries)} texts: give {limit} at most", 413)
    k = top_k if k is None else k
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= MAX_TOP_K:
        raise bad_request(f"topk is {excerpt(k)}: give a number from 1 to {MAX_TOP_K}")
    if len(queries) * k > MAX_PASSAGES:
        raise bad_request(
            f"{len(queries)} queries with topk {k} request too many passages: request "
            f"{MAX_PASSAGES} at most",
            413,
        )
    return [(query, k) for query in queries], parse_flag(body, "return_scores")
