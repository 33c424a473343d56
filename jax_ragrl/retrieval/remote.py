"""A retriever behind HTTP, with the protocol of the servers that Search-R1 and verl use.

  POST /retrieve  {"queries": [...], "topk": k, "return_scores": true}
  -> {"result": [[{"document": {"id": ..., "contents": '"title"\\ntext'}, "score": ...}, ...], ...]}

One list per query, best first (Jin et al. 2025). `ragrl serve` implements this protocol too.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

from jax_ragrl.corpus.formats.files import Record, field, optional_text, text
from jax_ragrl.corpus.formats.flashrag import split_contents
from jax_ragrl.errors import EffectError, UserError, redacted
from jax_ragrl.json_text import loads
from jax_ragrl.retrieval.base import check_depth
from jax_ragrl.retrieval.http import RefusedError, RetryingClient
from jax_ragrl.runtime.servers import UnavailableError, read_key
from jax_ragrl.types import Hits, Passage

PATH = "/retrieve"
KEY_VARIABLE = "RAGRL_RETRIEVER_KEY"  # the environment variable with the server's API key
MAYBE_ONE_QUERY = (400, 413, 422)  # refusals that one query of the request may cause


class RemoteRetriever:
    """Searches the corpus of a server; the fingerprint is its address.

    The environment variable `RAGRL_RETRIEVER_KEY` is the server's API key, if it needs one. The
    address is `http://HOST:PORT`, with or without `/retrieve`; see `RetryingClient` for retries and
    seconds per try. A query that the server rejects fails alone: if a request of several queries is
    refused, or fails in all tries, each half of it is sent separately.

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

    def search(self, queries: Sequence[str], k: int) -> list[Hits | EffectError]:
        """Returns up to `k` passages per query in the server's order.

        A query that failed has an `EffectError`, as have all remaining queries once the server was
        unavailable in all tries.
        """
        check_depth(k)
        results: list[Hits | EffectError] = []
        try:
            for i in range(0, len(queries), self._batch):
                results += self._query(queries[i : i + self._batch], k)
        except UnavailableError as error:  # earlier results stay in the list
            results += [error] * (len(queries) - len(results))
        return results

    def _query(
        self, queries: Sequence[str], k: int, *, is_part: bool = False
    ) -> list[Hits | EffectError]:
        """A result per query; `is_part` marks a part of a failed request."""
        body = {"queries": list(queries), "topk": k, "return_scores": True}
        place = f"{self.fingerprint}{PATH}"
        try:
            # Parts are not retried on status 500: the complete request already was.
            results = self._server.post(
                *(PATH, body, lambda content: read_result(content, place, len(queries), k)),
                patient=not is_part,
                key=self._key,
            )
        except RefusedError as error:
            one = len(queries) == 1
            subject = f"query {queries[0][:100]!r}" if one else f"{len(queries)} queries"
            verb = "refused" if error.status < 500 else "failed on"
            if one or (error.status < 500 and error.status not in MAYBE_ONE_QUERY):
                failure = EffectError(f"{place} {verb} {subject} with {error}")
                return [failure] * len(queries)
            # Halving isolates the faulty query after log2(batch) rounds; the others get their hits.
            half = len(queries) // 2
            parts = (queries[:half], queries[half:])
            return [x for part in parts for x in self._query(part, k, is_part=True)]
        except EffectError as error:
            # The server may fail on every query of a part alone, and yet be available.
            if isinstance(error, UnavailableError) and not is_part:
                raise
            return [error] * len(queries)
        # Queries whose hits cannot be read are asked once more, in one request.
        pairs = zip(queries, results, strict=True)
        unread = [query for query, result in pairs if isinstance(result, EffectError)]
        again = iter(self._query(unread, k, is_part=True) if unread and not is_part else ())
        return [next(again, x) if isinstance(x, EffectError) else x for x in results]


def read_result(content: bytes, place: str, queries: int, k: int) -> list[Hits | EffectError]:
    """Returns the hits per query of a reply, or their error; `ValueError` for another body."""
    body = loads(content)
    result = body.get("result") if isinstance(body, dict) else None
    if not isinstance(result, list) or len(result) != queries:
        raise ValueError(
            f'for {queries} queries: it must be {{"result": [...]}} with a list of hits for each'
        )
    return [_hits(entries, k, f"{place}, query {q}") for q, entries in enumerate(result, start=1)]


def _hits(entries: Any, k: int, place: str) -> Hits | EffectError:
    """Search-R1's servers of Google and SerpAPI send no scores: the score is then 1 / rank."""
    if not isinstance(entries, list):
        return EffectError(f"{place}: {str(entries)[:200]!r} is not a list of hits")
    entries = entries[:k]
    has_scores = any(isinstance(entry, dict) and "score" in entry for entry in entries)
    passages, scores = [], list[float]()
    try:
        for n, entry in enumerate(entries, start=1):
            hit = Record(f"{place}, hit {n}", entry if isinstance(entry, dict) else {})
            document = field(hit, "document", dict)
            passages.append(to_passage(Record(hit.place, document)))
            score: Any = field(hit, "score", object) if has_scores else 1 / n
            is_number = isinstance(score, int | float) and not isinstance(score, bool)
            # False for NaN, infinity, and integers that are larger than any float.
            if not (is_number and abs(score) <= sys.float_info.max):
                why = f"the score {str(score)[:200]!r} is not a finite number: send one"
                raise UserError(f"{hit.place}: {why}")
            scores.append(float(score))
    except UserError as error:
        return EffectError(str(error))
    return Hits(tuple(passages), tuple(scores))


def to_passage(document: Record) -> Passage:
    """Converts a document; without fields `title` and `text` its contents are split.

    Search-R1's servers of BM25, Google and SerpAPI send no id: it is then a hash of the passage.
    """
    fields = document.fields
    if isinstance(fields.get("title"), str) and isinstance(fields.get("text"), str):
        title, body = fields["title"], fields["text"]
    else:
        title, body = split_contents(
            field(document, "contents", str), optional_text(document, "title")
        )
    if fields.get("id") is not None:
        name = text(document, "id")
    else:
        name = hashlib.sha256(f"{title}\n{body}".encode()).hexdigest()[:16]
    return Passage(name, title, body)


def to_document(passage: Passage) -> dict[str, str]:
    """Converts a passage to a document; the inverse of `to_passage`."""
    return {**passage._asdict(), "contents": f'"{passage.title}"\n{passage.text}'}
