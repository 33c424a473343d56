"""What a request holds, and what is said of one that holds something else."""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

BYTES = 1 << 24  # of a request
CHARACTERS = 1 << 13  # of a question
QUERIES = 1 << 12  # of a request
TOP_K = 1000  # passages of a query
PASSAGES = 1 << 18  # of a reply


def wrong(why: str, status: int = 400) -> HTTPException:
    """The refusal of a request."""
    return HTTPException(status, why)


async def read(request: Request) -> dict[str, Any]:
    """The JSON object of a request."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BYTES:
            raise wrong(f"the request has more than {BYTES} bytes: ask for less at once", 413)
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise wrong(f"the request is not JSON ({error}): send an object such as "
                    '{"question": "..."}') from error  # fmt: skip
    if not isinstance(body, dict):
        raise wrong(f"the request is {shown(body)}: send a JSON object")
    return body


def shown(value: Any) -> str:
    """The beginning of a value, for a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def question(text: Any, name: str = "question") -> str:
    """A text that can be asked."""
    if not isinstance(text, str) or not text.strip():
        raise wrong(f"{name} is {shown(text)}: give a text that is not blank")
    if len(text) > CHARACTERS:
        raise wrong(f"{name} has {len(text)} characters: give {CHARACTERS} at most", 413)
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise wrong(f"{name} is {shown(text)}, half a surrogate pair: send whole characters")
    return text


def questions(body: dict[str, Any], name: str, most: int) -> list[str]:
    """The texts of a list field, `most` of them at most."""
    given = body.get(name)
    if not isinstance(given, list) or not given:
        raise wrong(f"{name} is {shown(given)}: give a list of texts")
    if len(given) > most:
        raise wrong(f"{name} holds {len(given)} texts: give {most} at most", 413)
    return [question(text, f"{name}[{i}]") for i, text in enumerate(given)]


def asked(body: dict[str, Any], most: int) -> tuple[list[str], bool]:
    """The questions of a request, and whether their steps are wanted."""
    unknown = sorted(body.keys() - {"question", "questions", "trace"})
    if unknown or ("question" in body) == ("questions" in body):
        raise wrong(
            f"the request has the fields {shown(sorted(body))}: give either question or questions, "
            "and trace if you like"
        )
    trace = body.get("trace", False)
    if not isinstance(trace, bool):
        raise wrong(f"trace is {shown(trace)}: give true or false")
    one = [question(body["question"])] if "question" in body else []
    return one or questions(body, "questions", most), trace


def searched(body: dict[str, Any], top_k: int) -> tuple[list[tuple[str, int]], bool]:
    """The queries of a request with how many passages each wants, and whether with their scores.

    A query may be anything: what a policy writes is not refused.
    """
    queries, k, scored = body.get("queries"), body.get("topk"), body.get("return_scores", False)
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise wrong(f"queries is {shown(queries)}: give a list of texts")
    if len(queries) > QUERIES:
        raise wrong(f"queries holds {len(queries)} texts: give {QUERIES} at most", 413)
    k = top_k if k is None else k
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= TOP_K:
        raise wrong(f"topk is {shown(k)}: give a number from 1 to {TOP_K}")
    if len(queries) * k > PASSAGES:
        raise wrong(f"{len(queries)} queries with topk {k} ask for too many passages: ask for "
                    f"{PASSAGES} at most", 413)  # fmt: skip
    if not isinstance(scored, bool):
        raise wrong(f"return_scores is {shown(scored)}: give true or false")
    return [(query, k) for query in queries], scored


def chatted(body: dict[str, Any]) -> str:
    """The last user message of a chat request, which may be a list of text parts."""
    if body.get("stream"):
        raise wrong("stream is true, but answers come whole: leave stream out")
    if body.get("n", 1) not in (1, None):
        raise wrong(f"n is {shown(body['n'])}, but there is one answer to a question: leave n out")
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise wrong(f"messages is {shown(messages)}: give a list of objects with role and content")
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    if not said:
        raise wrong("no message has the role user: the last such message is the question")
    return question(_plain(said[-1]), "the content of the last user message")


def _plain(content: Any) -> Any:
    """A list of text parts as one text; anything else as it is."""
    parts = content if isinstance(content, list) else []
    texts = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"]
    whole = len(texts) == len(parts) and all(isinstance(t, str) for t in texts)
    return "".join(map(str, texts)) if parts and whole else content
