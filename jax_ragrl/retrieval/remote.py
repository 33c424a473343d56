"""A retriever behind HTTP, in the form of the servers that Search-R1 and verl train with.

  POST /retrieve  {"queries": [...], "topk": k, "return_scores": true}
  -> {"result": [[{"document": {"id": ..., "contents": '"title"\\ntext'}, "score": ...}, ...], ...]}

one list a query, best first (Jin et al. 2025). `ragrl serve` speaks it too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax_ragrl.corpus.formats.files import Record, field, loads
from jax_ragrl.corpus.formats.flashrag import split_contents
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import check_depth
from jax_ragrl.retrieval.http import Patient, unless_refused
from jax_ragrl.types import Hits, Passage

PATH = "/retrieve"
ASKED = (400, 413, 422)  # a refusal that may be of one query alone


class RemoteRetriever:
    """Searches whatever the server at an address searches: that address is the fingerprint.

    A query of which the server makes nothing fails alone: where a request of several is refused, or
    ends in an error through all tries, each half of it is asked by itself.

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
        self.fingerprint = url.rstrip("/").removesuffix(PATH)
        self._server = Patient(self.fingerprint, retries, timeout, pause)
        self._batch = batch
        self._known = False  # whether it ever found something

    def search(self, queries: Sequence[str], k: int) -> list[Hits | EffectError]:
        """The `k` best passages of each query as the server ranks them, fewer if it sends fewer.

        An `EffectError` stands in place of what it did not find: for a query, or for all that were
        left when it stayed away through all tries.

        Raises:
          UserError: k is below 1; a server that never found anything refused, or sent something
            else: then the address, or k, is to blame.
        """
        check_depth(k)
        found: list[Hits | UserError | EffectError] = []
        try:
            for i in range(0, len(queries), self._batch):
                found.extend(self._ask(queries[i : i + self._batch], k))
        except EffectError as error:  # what came before it is in the list
            found += [error] * (len(queries) - len(found))
        self._known = self._known or any(isinstance(x, Hits) for x in found)
        return unless_refused(found, self._known)

    def _ask(
        self, queries: Sequence[str], k: int, *, whole: bool = True
    ) -> Iterator[Hits | UserError | EffectError]:
        """What becomes of some queries, in order; `whole` where they are no part of a request."""
        body = {"queries": list(queries), "topk": k, "return_scores": True}
        reply = self._server.post(PATH, body, patient=whole)
        place, status = f"{self.fingerprint}{PATH}", reply.status_code
        if status == 200:
            yield from read_result(reply.text, place, len(queries), k)
            return
        one = f"query {queries[0][:100]!r}" if len(queries) == 1 else f"{len(queries)} queries"
        did = "refused" if status < 500 else "failed on"
        told = f"{place} {did} {one} with status {status}: {reply.text[:200]!r}"
        if status < 500 and status not in ASKED:
            yield from [UserError(told)] * len(queries)
        elif len(queries) == 1:
            yield UserError(told) if status < 500 else EffectError(told)
        else:
            half = len(queries) // 2
            yield from self._ask(queries[:half], k, whole=False)
            yield from self._ask(queries[half:], k, whole=False)


def read_result(text: str, place: str, queries: int, k: int) -> list[Hits | UserError]:
    """The hits of each query of a reply; in their place an error, with what another form has."""
    try:
        body = loads(text)
    except ValueError:
        body = None
    result = body.get("result") if isinstance(body, dict) else None
    if not isinstance(result, list) or len(result) != queries:
        told = (
            f'{place} sent {text[:200]!r} for {queries} queries: it must be {{"result": [...]}} '
            "with a list of hits for each"
        )
        return [UserError(told)] * queries
    return [_hits(found, k, f"{place}, query {q}") for q, found in enumerate(result, start=1)]


def _hits(found: Any, k: int, place: str) -> Hits | UserError:
    if not isinstance(found, list):
        return UserError(f"{place}: {str(found)[:200]!r} is not a list of hits")
    try:
        return read_hits(found[:k], place)
    except UserError as error:
        return error


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
