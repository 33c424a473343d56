"""A retriever behind HTTP finds what the one behind it finds, or says what came instead."""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.responses import Response

from jax_ragrl.corpus.formats import save_questions
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import search_all, search_pages
from jax_ragrl.retrieval.hashed_words import HashedEncoder
from jax_ragrl.retrieval.index import build_index
from jax_ragrl.retrieval.kinds import RemoteIndex, VectorIndex
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.rollout.collect import Environment
from jax_ragrl.run.config import Data, FileData, WorldData
from jax_ragrl.run.data import load_data
from jax_ragrl.run.index import load_retriever
from jax_ragrl.serve.app import application
from jax_ragrl.serve.replies import ServedSystem
from jax_ragrl.systems.baselines.standard import StandardRAG
from jax_ragrl.types import Passage
from tests.listening import listening
from tests.retrieval.engine import engine
from tests.rollout.tape import ANN, BOB, Tape

Reply = Callable[[dict[str, Any]], tuple[int, Any]]
GOOD = {"document": {"id": 1, "contents": "t\nx"}, "score": 1.0}
PASSAGES = (
    Passage("1", "Silent Harbor", "Silent Harbor was directed by Adela Brandt in 1971."),
    Passage("2", '"Adela" Brandt', "Adela Brandt was born in Thornby.\nShe\tdirected.  "),
    Passage("3", "", "Thornby is a city in Estoria run by mayor Otto Novak."),
    Passage("4", "Golden\nRiver", "Golden River starred Bruno Castell of Harbor. \u00e9\U0001f600"),
)
QUERIES = ["who directed Silent Harbor", "Thornby", "nothing known", "", "Harbor Brandt"]


@contextlib.contextmanager
def answering(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a retriever, and what it was asked; `reply` gives a status and a body."""

    def answer(asked: dict[str, Any]) -> Response:
        status, value = reply(asked)
        return Response(value if isinstance(value, bytes) else json.dumps(value), status)

    with engine(answer, "/retrieve") as server:
        yield server


def documents(body: dict[str, Any]) -> tuple[int, Any]:
    """As a dense retriever over wiki-18 replies: the title is in the contents alone."""

    def hit(query: str, n: int) -> dict[str, Any]:
        document = {"id": n, "contents": f'"{query} {n}"\nText {n} of\n{query}.'}
        return {"document": document, "score": 1 - n / 8}

    return 200, {"result": [[hit(q, n) for n in range(body["topk"])] for q in body["queries"]]}


def test_a_served_index_equals_the_local_one(tmp_path: pathlib.Path):
    encoder = HashedEncoder.fit(PASSAGES, 512)
    local = build_index(Corpus(PASSAGES), encoder, "exact", tmp_path / "index")
    tape = Tape({}, replies={"answer": "Ulm"})
    environment = Environment(tape, local, tape)
    served = ServedSystem("tape", "a stub", StandardRAG("c3po_tiny", 2), environment, ANN.text)
    with listening(application(served)) as address:
        remote = RemoteRetriever(address, batch=2)
        for k in (1, 3, 9):
            assert remote.search(QUERIES, k) == local.search(QUERIES, k)
        pages = [(query, 2, page) for page in (1, 0, 2) for query in QUERIES]
        assert search_pages(remote, pages) == search_pages(local, pages)
        assert remote.search([], 1) == [] and remote.fingerprint == address
        (refusal,) = RemoteRetriever(address).search(["q"], 10**6)
        assert re.search("status 400.*from 1 to", str(refusal))


def test_batches_share_a_connection_and_keep_the_order():
    with answering(documents) as (address, seen):
        remote = RemoteRetriever(address, batch=2)
        results = [hits for _ in range(2) for hits in remote.search(list("abcde"), 1)]
    assert [hits.passages[0].title for hits in results] == [f"{q} 0" for q in "abcde" * 2]
    assert [len(body["queries"]) for body in seen] == [2, 2, 1] * 2
    assert len({body["port"] for body in seen}) == 1


def is_found(results: list[Any]) -> list[bool]:
    return [not isinstance(hits, EffectError) for hits in results]


@pytest.mark.parametrize("status", [400, 413, 422, 500])
@pytest.mark.parametrize("wrong", [[0], [5], [2, 3, 7]])
def test_a_query_that_a_server_makes_nothing_of_fails_alone(status: int, wrong: list[int]):
    queries = [f"bad {i}" if i in wrong else f"good {i}" for i in range(8)]

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        bad = any("bad" in query for query in body["queries"])
        return (status, {"detail": "cannot"}) if bad else documents(body)

    with answering(reply) as (address, seen):
        results = RemoteRetriever(address, retries=1, pause=0.01).search(queries, 1)
    assert is_found(results) == [i not in wrong for i in range(8)]
    assert f"query 'bad {wrong[0]}' with status {status}" in str(results[wrong[0]])
    assert "cannot" in str(results[wrong[0]])
    assert all(results[i].passages[0].title == f"good {i} 0" for i in range(8) if i not in wrong)
    # Once more where that may help, and then halves of halves.
    assert len(seen) <= 1 + (status == 500) + 2 * 3 * len(wrong)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_an_outage_keeps_earlier_hits_and_skips_single_queries_and_later_batches(status: int):
    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return documents(body) if "a" in body["queries"] else (status, {})

    with answering(reply) as (address, seen):
        remote = RemoteRetriever(address, batch=2, retries=1, pause=0.01)
        results = remote.search(list("abcdef"), 1)
        assert [body["queries"] for body in seen] == [["a", "b"], ["c", "d"], ["c", "d"]]
        with pytest.raises(EffectError, match="failed 2 times"):
            search_all(remote, ["b"], 1)
    assert is_found(results) == [True] * 2 + [False] * 4 and "failed 2 times" in str(results[-1])


def test_extra_hits_are_dropped():
    with answering(lambda body: documents({**body, "topk": 9})) as (address, _):
        (hits,) = RemoteRetriever(address).search(["a"], 2)
    assert [passage.title for passage in hits.passages] == ["a 0", "a 1"] and len(hits.scores) == 2


@pytest.mark.parametrize("lasts", [True, False])
def test_queries_whose_hits_cannot_be_read_are_asked_once_more_and_fail_alone(lasts: bool):
    nan = {"document": {"id": 1, "contents": "x"}, "score": float("nan")}

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        status, value = documents(body)
        for i, query in enumerate(body["queries"]):
            if query == "bad" and (lasts or len(seen) == 1):
                value["result"][i] = [nan]
        return status, value

    with answering(reply) as (address, seen):
        results = RemoteRetriever(address).search(["a", "bad", "b"], 1)
    assert is_found(results) == [True, not lasts, True]
    assert [body["queries"] for body in seen] == [["a", "bad", "b"], ["bad"]]
    if lasts:
        assert "query 1, hit 1: the score 'nan'" in str(results[1])


BM25 = {"document": {"title": "T", "text": "a b", "contents": '"T"\na b'}, "score": 7.5}
CUT = {"document": {"id": "1", "title": None, "text": None, "contents": '"T"\n\ud83d'}}


@pytest.mark.parametrize(
    ("entry", "passage", "scores"),
    [
        # Its servers of Google and SerpAPI.
        ({"document": {"contents": '"T"\na b'}}, ("T", "a b"), [1, 0.5]),
        # Its server of BM25, whose index holds the documents.
        (BM25, ("T", "a b"), [7.5, 7.5]),
        (CUT, ("1", "T", "\ufffd"), [1.0]),
        # Its dense server, and BM25 over a corpus file.
        ({"document": {"id": "0", "contents": '"T"\na b'}, "score": 1}, ("0", "T", "a b"), [1, 1]),
        ({"document": {"id": None, "contents": "a b"}}, ("", "a b"), [1]),
    ],
)
def test_every_published_server_of_search_r1_is_read(entry: Any, passage: Any, scores: Any):
    """Passages without an id have the hash of title and text, and a score of their rank."""
    if len(passage) == 2:
        passage = (hashlib.sha256("\n".join(passage).encode()).hexdigest()[:16], *passage)
    with answering(lambda body: (200, {"result": [[entry] * len(scores)]})) as (address, _):
        (hits,) = RemoteRetriever(address).search(["q"], 5)
    assert hits.passages == (Passage(*passage),) * len(scores) and hits.scores == tuple(scores)


def test_an_address_without_a_retriever_is_asked_once():
    with answering(lambda body: (404, {})) as (address, seen):
        results = RemoteRetriever(address).search(["a", "b"], 1)
    assert len(seen) == 1 and all(re.search("2 queries.*404", str(result)) for result in results)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"<html>hello", "<html>hello"),
        ([[GOOD]], "contents"),
        ({"results": [[GOOD]]}, '"results"'),
        ({"result": [[GOOD], [GOOD]]}, "for 1 queries"),
        ({"result": [GOOD]}, "is not a list of hits"),
        ({"result": [["text"]]}, "query 1, hit 1: field 'document' is missing"),
        ({"result": [[GOOD, {"id": 1, "contents": "x"}]]}, "hit 2: field 'document' is missing"),
        ({"result": [[{"document": "x", "score": 1}]]}, "'document' holds str"),
        ({"result": [[{"document": {"id": [1], "contents": "x"}}]]}, "field 'id' holds list"),
        ({"result": [[{"document": {"id": 1, "text": "x"}, "score": 1}]]}, "field 'contents'"),
        ({"result": [[{**GOOD, "score": "high"}]]}, "score 'high' is not a finite number"),
        ({"result": [[{**GOOD, "score": None}]]}, "score 'None' is not a finite number"),
        ({"result": [[GOOD, {"document": GOOD["document"]}]]}, "hit 2: field 'score' is missing"),
        ({"result": [[{**GOOD, "score": 10**400}]]}, "is not a finite number"),
        ({"result": [[{**GOOD, "score": True}]]}, "score 'True' is not a finite number"),
        (b'{"result": [[{"document": {"id": 1, "contents": "x"}, "score": NaN}]]}', "score 'nan'"),
        (b'{"result": [[{"document": {"id": 1, "contents": "x"}, "score": 1e999}]]}', "'inf'"),
    ],
)
def test_a_reply_of_another_form_is_shown(value: Any, message: str):
    with answering(lambda body: (200, value)) as (address, _):
        (failure,) = RemoteRetriever(address, retries=0).search(["a"], 3)
    assert isinstance(failure, EffectError)
    assert message in str(failure) and address in str(failure)


def test_a_remote_index_needs_an_address_and_no_corpus(tmp_path: pathlib.Path):
    file = tmp_path / "questions.jsonl"
    save_questions([ANN, BOB], file)
    files = FileData("", str(file), str(file), str(file))
    corpus, questions, _ = load_data(Data(files=files))
    both = load_data(Data(world=WorldData(size=40), files=files))  # as an override of a world's
    assert both.questions == questions and both.world is None
    with answering(documents) as (address, _):
        index = RemoteIndex(address)
        (hits,) = load_retriever(corpus, index, tmp_path).search([questions["dev"][1].text], 1)
    assert hits.passages[0].title == f"{BOB.text} 0" and [*tmp_path.iterdir()] == [file]
    with pytest.raises(UserError, match="no corpus.*index.kind to remote"):
        load_retriever(corpus, VectorIndex(), tmp_path)


def test_retries_and_timeout_come_from_the_config(tmp_path: pathlib.Path):
    with answering(lambda body: (503, {})) as (address, seen):
        index = RemoteIndex(address, retries=0)
        (error,) = load_retriever(Corpus(()), index, tmp_path).search(["a"], 1)
    assert isinstance(error, EffectError) and len(seen) == 1
    with pytest.raises(UserError, match="timeout 0"):
        load_retriever(Corpus(()), dataclasses.replace(index, timeout=0), tmp_path)


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "http://", "http://h:x", "ftp://host", "http://a..b"]
)
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(UserError, match="http://HOST:PORT"):
        RemoteRetriever(url)
    assert RemoteRetriever("https://host:1/retrieve").fingerprint == "https://host:1"
    with pytest.raises(UserError, match="retries -1"):
        RemoteRetriever("http://host", retries=-1)
