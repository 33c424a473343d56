"""A search engine of the web as the retriever: hits are pages, asked for once, failures no hits."""

import json
import pathlib
import re
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from jax_ragrl.config.schema import convert
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import search_pages
from jax_ragrl.retrieval.kinds import Index, RemoteIndex
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.retrieval.web import WebRetriever
from jax_ragrl.run.index import load_retriever
from jax_ragrl.run.short_names import parse_index
from jax_ragrl.types import Passage
from tests.retrieval.engine import SIZE, engine, pages, results


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "secret")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("serper", {"q": "a", "page": 1, "method": "POST", "key": "secret"}),
        ("searxng", {"q": "a", "format": "json", "pageno": "1", "method": "GET", "key": None}),
    ],
)
def test_an_engine_is_asked_in_its_own_form(name: str, asked: dict[str, Any]):
    with engine(pages) as (address, seen):
        web = WebRetriever(name, f"{address}/search/")
        (hits,) = web.search(["a"], 2)
    assert [{name: row[name] for name in row if name != "port"} for row in seen] == [asked]
    assert web.fingerprint == address
    assert hits.passages[1] == Passage("http://a/1", "T http://a/1", "text of http://a/1")
    assert hits.scores == (1.0, 0.5) and len(hits.passages) == 2


@pytest.mark.parametrize(("name", "number"), [("serper", "page"), ("searxng", "pageno")])
def test_pages_are_requested_until_there_are_enough_hits(name: str, number: str):
    with engine(pages) as (address, seen):
        web = WebRetriever(name, address)
        assert web.search(["a"], SIZE) and len(seen) == 1
        deep = {k: web.search(["a"], k)[0].passages for k in (1, 3, 4, 9, 9)}
    assert [p.id for p in deep[9]] == [f"http://a/{n}" for n in range(5)]
    assert all(deep[k] == deep[9][:k] for k in deep)
    assert [int(asked[number]) for asked in seen] == [1, 2, 3]  # each once, for all depths


def test_a_repeated_page_ends_the_search():
    with engine(lambda asked: {"results": results(asked, 0, 2)}) as (address, seen):
        (hits,) = WebRetriever("searxng", address).search(["a"], 9)
    assert len(hits.passages) == 2 and len(seen) == 2


def test_cached_hits_serve_a_resumed_run(tmp_path: pathlib.Path):
    folder = tmp_path / "index"
    with engine(pages) as (address, seen):
        asked = [("a", 2, 1), ("b", 2, 0), ("a", 2, 0)]
        before = search_pages(WebRetriever("searxng", address, folder, writer=1), asked)
        with (folder / "searxng-1.jsonl").open("a") as file:
            file.write('{"query": "c", "pa')  # the run was killed here
        number = len(seen)
        again = WebRetriever("searxng", address, folder, writer=1)
        assert search_pages(again, asked) == before and len(seen) == number
        again.search(["d"], 1)
        other_process = WebRetriever("searxng", address, folder)  # another process of the run
        assert other_process.search(["a", "d"], 1) == again.search(["a", "d"], 1)
        assert len(seen) == number + 1
    assert sorted(file.name for file in folder.iterdir()) == ["searxng-1.jsonl"]


def test_what_another_engine_found_is_asked_for_again(tmp_path: pathlib.Path):
    with engine(pages) as (address, seen):
        for name in ("serper", "searxng", "serper", "searxng"):
            WebRetriever(name, address, tmp_path).search(["a"], 1)
    assert [asked["method"] for asked in seen] == ["POST", "GET"]


def test_queries_come_back_in_order_each_asked_once():
    with engine(pages) as (address, seen):
        queries = [f"q{i}" for i in range(20)] * 2
        hits = WebRetriever("searxng", address).search(queries, 1)
    assert [h.passages[0].id for h in hits] == [f"http://{query}/0" for query in queries]
    assert len(seen) == 20


def test_a_refused_query_fails_alone():
    def reply(asked: dict[str, Any]) -> Any:
        if asked["q"] == "bad":
            return JSONResponse({"message": "no"}, 400)
        return {"results": []} if asked["q"] == "none" else pages(asked)

    with engine(reply) as (address, _):
        good, none, bad = WebRetriever("searxng", address).search(["good", "none", "bad"], 1)
    assert len(good.passages) == 1 and none.passages == ()
    assert isinstance(bad, EffectError) and "'bad' with status 400" in str(bad)


def test_unresponsive_engines_are_not_an_empty_page(tmp_path: pathlib.Path):
    away = {"results": [], "unresponsive_engines": [["google", "Suspended: CAPTCHA"]]}
    replies = iter([away])
    with engine(lambda asked: next(replies, None) or away | pages(asked)) as (address, _):
        web = WebRetriever("searxng", address, tmp_path)
        (error,) = web.search(["a"], 1)
        assert isinstance(error, EffectError) and "CAPTCHA" in str(error)
        # The failure was not kept as a page without hits, and hits of others are not lost.
        assert web.search(["a"], 1)[0].passages


def test_remaining_queries_do_not_wait_for_an_unavailable_engine():
    with engine(lambda asked: Response("busy", 503)) as (address, seen):
        web = WebRetriever("searxng", address, retries=1, pause=0.05)
        errors = web.search([str(i) for i in range(100)], 1)
        assert all(isinstance(e, EffectError) and "failed 2 times" in str(e) for e in errors)
        assert 2 <= len(seen) <= 50  # eight at once, each twice; not 200
        before = len(seen)
        web.search(["again"], 1)
    assert len(seen) == before + 2


@pytest.mark.parametrize(
    ("name", "reply", "message"),
    [
        ("serper", Response('{"message": "Unauthorized."}', 403), "403.*SERPER_API_KEY right"),
        ("searxng", Response("Forbidden", 403), "403.*json under search.formats"),
        ("searxng", Response("<html>", 200), "failed 1 times.*<html>"),
        ("serper", JSONResponse({"results": []}), "no list 'organic'"),
        ("serper", JSONResponse([]), "no list 'organic'"),
    ],
)
def test_an_engine_that_never_found_anything_fails_its_queries(name, reply, message):
    with engine(lambda asked: reply) as (address, _):
        for failure in WebRetriever(name, address, retries=0).search(["a", "b"], 1):
            assert isinstance(failure, EffectError) and re.search(message, str(failure))
            assert address in str(failure) and "secret" not in str(failure)


def test_hits_without_an_address_are_dropped():
    hits = [{"title": "x"}, "text", {"link": "http://a", "title": None}]
    with engine(lambda asked: {"organic": hits}) as (address, _):
        (got,) = WebRetriever("serper", address).search(["a"], 1)
    assert got.passages == (Passage("http://a", "", ""),)
    cut = Response('{"organic": [{"link": "http://a", "snippet": "half a sign \\ud83d"}]}')
    with engine(lambda asked: cut) as (address, _):
        (got,) = WebRetriever("serper", address).search(["a"], 1)
    assert got.passages == (Passage("http://a", "", "half a sign \ufffd"),)


def test_an_engine_needs_its_key_and_its_name(monkeypatch: pytest.MonkeyPatch):
    assert WebRetriever("serper").fingerprint == "https://google.serper.dev"
    with pytest.raises(UserError, match="timeout 0"):
        WebRetriever("serper", timeout=0)
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(UserError, match="set SERPER_API_KEY"):
        WebRetriever("serper")
    with pytest.raises(UserError, match="'bing': use one of serper, searxng"):
        WebRetriever("bing")
    with pytest.raises(UserError, match="k=0 asks for no passages"):
        WebRetriever("searxng", "http://localhost:1").search(["a"], 0)


def test_a_run_caches_hits_in_its_folder(tmp_path: pathlib.Path):
    with engine(pages) as (address, _):
        index = convert(Index, {"kind": "searxng", "url": address}, "config.index")
        assert index == parse_index(f"searxng@{address}") and parse_index("serper").url == ""
        assert parse_index("http://me@host:1") == RemoteIndex("http://me@host:1")
        (hits,) = load_retriever(Corpus(()), index, tmp_path).search(["a"], 1)
    (row,) = map(json.loads, (tmp_path / "index" / "searxng-0.jsonl").read_text().splitlines())
    assert row["query"] == "a" and row["hits"][0][0] == hits.passages[0].id == "http://a/0"


def test_a_key_that_no_header_may_contain_is_never_printed(monkeypatch: pytest.MonkeyPatch):
    for broken in ("sec\u2019ret", "sec\nret"):
        for name in ("SERPER_API_KEY", "RAGRL_RETRIEVER_KEY"):
            monkeypatch.setenv(name, broken)
        for make in (lambda: WebRetriever("serper"), lambda: RemoteRetriever("http://host:1")):
            with pytest.raises(UserError, match="KEY contains invalid .*copy the key") as refusal:
                make()
            assert "sec" not in str(refusal.value)


def test_cached_pages_do_not_hide_a_refused_key(tmp_path: pathlib.Path):
    with engine(pages) as (address, _):
        WebRetriever("serper", address, tmp_path).search(["a"], 1)
    with engine(lambda asked: Response("Unauthorized", 403)) as (address, _):
        again = WebRetriever("serper", address, tmp_path)
        assert again.search(["a"], 1)[0].passages
        cached, refused = again.search(["a", "b"], 1)
        assert cached.passages and "SERPER_API_KEY right" in str(refused)


@pytest.mark.parametrize("query", ["x" * 70_000, "\ud800"])
def test_a_query_that_no_request_can_hold_fails_alone(query: str):
    with engine(pages) as (address, _):
        good, bad = WebRetriever("searxng", address).search(["good", query], 1)
    assert good.passages and isinstance(bad, EffectError) and "invalid request" in str(bad)
