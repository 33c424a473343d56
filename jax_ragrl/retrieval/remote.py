"""A retriever behind HTTP, in the form of the servers that Search-R1 and verl train with.

  POST /retrieve  {"queries": [...], "topk": k, "return_scores": true}
  -> {"result": [[{"document": {"id": ..., "contents": '"title"\\ntext'}, "score": ...}, ...], ...]}

one list a query, best first (Jin et al. 2025). `ragrl serve` speaks it too.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from typing import Any

import httpx2

from jax_ragrl.corpus.formats.files import Record, field
from jax_ragrl.corpus.formats.flashrag import split_contents
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.types import Hits, Passage

PATH = "/retrieve"
BUSY = 429  # like 5xx, over by itself


class RemoteRetriever:
    """Searches whatever the server at an address searches: that address is the fingerprint.

    Args:
      url: `http://HOST:PORT`, with or without `/retrieve`.
      batch: queries of a request at most.
      retries: tries after the first, on time-outs, broken connections, 429 and 5xx.
      timeout: seconds to connect, and to wait for more of a reply.
      pause: seconds before the second try, doubled before each further one.

    Raises:
      UserError: an address of another form.
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
        try:
            whole = httpx2.URL(url).host and url.startswith(("http://", "https://"))
        except httpx2.InvalidURL:
            whole = False
        if not whole:
            raise UserError(f"{url!r} is no address of a retriever: give http://HOST:PORT")
        self.fingerprint = url.rstrip("/").removesuffix(PATH)
        self._batch, self._retries, self._pause = batch, retries, pause
        self._client = httpx2.Client(timeout=timeout)

    def search(self, queries: Sequence[str], k: int) -> list[Hits]:
        """The `k` best passages of each query as the server ranks them, fewer if it sends fewer.

        Raises:
          EffectError: the server stayed away through all tries.
          UserError: k is below 1; the server refused, or sent something else.
        """
        if k < 1:
            raise UserError(f"k={k} asks for no passages: give at least 1")
        chunks = [queries[i : i + self._batch] for i in range(0, len(queries), self._batch)]
        return [hits for chunk in chunks for hits in self._ask(chunk, k)]

    def _ask(self, queries: Sequence[str], k: int) -> list[Hits]:
        body = {"queries": list(queries), "topk": k, "return_scores": True}
        reply = self._post(json.dumps(body))
        if reply.status_code != 200:
            raise UserError(
                f"{self.fingerprint}{PATH} refused {len(queries)} queries with status "
                f"{reply.status_code}: {reply.text[:200]!r}"
            )
        return read_result(reply.text, f"{self.fingerprint}{PATH}", len(queries), k)

    def _post(self, body: str) -> httpx2.Response:
        """The first reply that asking again would not change."""
        tries, why = self._retries + 1, ""
        for i in range(tries):
            time.sleep(self._pause * 2 ** (i - 1) if i else 0)
            try:
                headers = {"Content-Type": "application/json"}
                url = f"{self.fingerprint}{PATH}"
                reply = self._client.post(url, content=body, headers=headers)
            except httpx2.RequestError as error:
                why = f"{type(error).__name__}: {error}"
                continue
            if reply.status_code < 500 and reply.status_code != BUSY:
                return reply
            why = f"status {reply.status_code}: {reply.text[:200]!r}"
        raise EffectError(f"{self.fingerprint} failed {tries} times, the last with {why}")


def read_result(text: str, place: str, queries: int, k: int) -> list[Hits]:
    """The hits of a reply; `UserError` with its beginning where it has another form."""
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    result = body.get("result") if isinstance(body, dict) else None
    lists = isinstance(result, list) and all(isinstance(found, list) for found in result)
    if not isinstance(result, list) or not lists or len(result) != queries:
        raise UserError(
            f'{place} sent {text[:200]!r} for {queries} queries: it must be {{"result": [...]}} '
            "with a list of hits for each"
        )
    return [read_hits(found[:k], f"{place}, query {q}") for q, found in enumerate(result, start=1)]


def read_hits(found: Sequence[Any], place: str) -> Hits:
    """The hits of a query: a document and a score each."""
    passages, scores = [], []
    for n, entry in enumerate(found, start=1):
        at = f"{place}, hit {n}"
        if not isinstance(entry, dict):
            raise UserError(f"{at}: {str(entry)[:200]!r} has no document and score: send both")
        hit = Record(at, entry)
        passages.append(to_passage(Record(at, field(hit, "document", dict))))
        score = field(hit, "score", object)
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise UserError(f"{at}: the score {str(score)[:200]!r} is no number: send one")
        scores.append(float(score))
    return Hits(tuple(passages), tuple(scores))


def to_passage(document: Record) -> Passage:
    """A document as a passage; title and text come from its contents unless it has them apart."""
    name, fields = str(field(document, "id", object)), document.fields
    if isinstance(fields.get("title"), str) and isinstance(fields.get("text"), str):
        return Passage(name, fields["title"], fields["text"])
    return Passage(name, *split_contents(field(document, "contents", str)))


def to_document(passage: Passage) -> dict[str, str]:
    """A passage as a document, of which `to_passage` makes the same passage again."""
    return {**passage._asdict(), "contents": f'"{passage.title}"\n{passage.text}'}
