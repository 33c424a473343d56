"""A retriever behind HTTP, with the protocol of the servers that Search-R1 and verl use.

  POST /retrieve  {"queries": [...], "topk": k, "return_scores": true}
  -> {"result": [[{"document": {"id": ..., "contents": '"title"\\ntext'}, "score": ...}, ...], ...]}

One list per query, best first (Jin et al. 2025). `ragrl serve` implements this protocol too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import httpx2

from jax_ragrl.corpus.formats.files import Record, field, text
from jax_ragrl.corpus.formats.flashrag import split_contents
from jax_ragrl.errors import EffectError, UserError, redacted
from jax_ragrl.json_text import loads_or_none
from jax_ragrl.retrieval.base import check_depth
from jax_ragrl.retrieval.http import RetryingClient, check_refusals, is_json
from jax_ragrl.runtime.servers import excerpt, read_key
from jax_ragrl.types import Hits, Passage

PATH = "/retrieve"
KEY_VARIABLE = "RAGRL_RETRIEVER_KEY"  # the environment variable with the server's API key
MAYBE_ONE_QUERY = (400, 413, 422)  # refusals that one query of the request may cause


class RemoteRetriever:
    """Searches the corpus of a server; the fingerprint is its address.

    The environment variable `RAGRL_RETRIEVER_KEY` is the server's API key, if it needs one.

    A query that the server rejects fails alone: if a request of several queries is refused, or
    fails in all tries, each half of it is sent separately.

    Args:
      url: `http://HOST:PORT`, with or without `/retrieve`.
      batch: maximum number of queries per request.
      retries: tries after the first, on time-outs, broken connections, 429, 5xx and replies
        without JSON; and, once the server has returned hits, on replies of another form.
      timeout: seconds from the start of a try to the last byte of its reply.
      pause: seconds before the second try; doubles before each further one.

    Raises:
      UserError: a malformed address, or a key with characters that no header may contain.
    """

    def __init__(
        self,
        url: str,
        *,
        batch: int = 256,
        retries: int = 5,
        timeout: float = 60.0,
        pause: float = 0.5,
    ) -> None:
        address = url.rstrip("/").removesuffix(PATH)
        self.fingerprint = redacted(address)
        self._server = RetryingClient(address, retries, timeout, pause)
        self._batch = batch
        self._key = read_key(KEY_VARIABLE)
        self._has_answered = False  # whether the server has ever returned hits

    def search(self, queries: Sequence[str], k: int) -> list[Hits | EffectError]:
        """Returns up to `k` passages per query in the server's order.

        A query that failed has an `EffectError`, as have all remaining queries once the server was
        unavailable in all tries.

        Raises:
          UserError: k is below 1; or a server that never returned hits refused, or sent a reply of
            another form: then the address, or k, is wrong.
        """
        check_depth(k)
        results: list[Hits | UserError | EffectError] = []
        try:
            for i in range(0, len(queries), self._batch):
                results.extend(self._query(queries[i : i + self._batch], k))
        except EffectError as error:  # earlier results stay in the list
            results += [error] * (len(queries) - len(results))
        self._has_answered = self._has_answered or any(isinstance(x, Hits) for x in results)
        return check_refusals(results, self._has_answered)

    def _query(
        self, queries: Sequence[str], k: int, *, is_split: bool = False
    ) -> Iterator[Hits | UserError | EffectError]:
        """Yields a result per query, in order; `is_split` marks half of a failed request."""
        body = {"queries": list(queries), "topk": k, "return_scores": True}

        def has_results(content: bytes) -> bool:
            return _results(content, len(queries)) is not None

        # Another form is a passing fault only if the server is known to send the right one.
        is_readable = has_results if self._has_answered else is_json
        # Halves are not retried on status 500: the complete request already was.
        reply = self._server.post(
            PATH, body, patient=not is_split, is_readable=is_readable, key=self._key
        )
        place, status = f"{self.fingerprint}{PATH}", reply.status_code
        if status == 200:
            yield from read_result(reply, place, len(queries), k)
            return
        subject = f"query {queries[0][:100]!r}" if len(queries) == 1 else f"{len(queries)} queries"
        verb = "refused" if status < 500 else "failed on"
        message = f"{place} {verb} {subject} with status {status}: {excerpt(reply.text)}"
        if status < 500 and status not in MAYBE_ONE_QUERY:
            yield from [UserError(message)] * len(queries)
        # Halving isolates the faulty query after log2(batch) rounds; the others get their hits.
        elif len(queries) == 1:
            yield UserError(message) if status < 500 else EffectError(message)
        else:
            half = len(queries) // 2
            yield from self._half(queries[:half], k)
            yield from self._half(queries[half:], k)

    def _half(self, queries: Sequence[str], k: int) -> Iterator[Hits | UserError | EffectError]:
        """Yields a result per query of half of a failed request."""
        try:
            yield from self._query(queries, k, is_split=True)
        except EffectError as error:  # the server may fail on every query of this half alone
            yield from [error] * len(queries)


def read_result(reply: httpx2.Response, place: str, queries: int, k: int) -> list[Hits | UserError]:
    """Parses the hits per query from a reply; a malformed part becomes an error.

    Args:
      reply: the reply, of status 200.
      place: the address, for error messages.
      queries: number of queries of the request.
      k: maximum number of hits per query.
    """
    result = _results(reply.content, queries)
    if result is None:
        message = (
            f"{place} sent {excerpt(reply.text)} for {queries} queries: it must be "
            '{"result": [...]} with a list of hits for each'
        )
        return [UserError(message)] * queries
    return [_hits(entries, k, f"{place}, query {q}") for q, entries in enumerate(result, start=1)]


def _results(content: bytes, queries: int) -> list[Any] | None:
    """Returns the entry of each query; None if a body has another form."""
    body = loads_or_none(content)
    result = body.get("result") if isinstance(body, dict) else None
    return result if isinstance(result, list) and len(result) == queries else None


def _hits(entries: Any, k: int, place: str) -> Hits | UserError:
    if not isinstance(entries, list):
        return UserError(f"{place}: {str(entries)[:200]!r} is not a list of hits")
    try:
        return read_hits(entries[:k], place)
    except UserError as error:
        return error


def read_hits(entries: Sequence[Any], place: str) -> Hits:
    """Parses the hits of a query; each has a document and a score."""
    passages, scores = [], []
    for n, entry in enumerate(entries, start=1):
        at = f"{place}, hit {n}"
        if not isinstance(entry, dict):
            raise UserError(f"{at}: {str(entry)[:200]!r} has no document and score: send both")
        hit = Record(at, entry)
        passages.append(to_passage(Record(at, field(hit, "document", dict))))
        score = field(hit, "score", object)
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise UserError(
                f"{at}: the score {str(score)[:200]!r} is not a finite number: send one"
            )
        scores.append(float(score))
    return Hits(tuple(passages), tuple(scores))


def to_passage(document: Record) -> Passage:
    """Converts a document; without fields `title` and `text` its contents are split."""
    name, fields = text(document, "id"), document.fields
    if isinstance(fields.get("title"), str) and isinstance(fields.get("text"), str):
        return Passage(name, fields["title"], fields["text"])
    return Passage(name, *split_contents(field(document, "contents", str)))


def to_document(passage: Passage) -> dict[str, str]:
    """Converts a passage to a document; the inverse of `to_passage`."""
    return {**passage._asdict(), "contents": f'"{passage.title}"\n{passage.text}'}
