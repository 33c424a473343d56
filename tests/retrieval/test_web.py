"""A search engine of the web as the retriever: hits are pages, asked for once, failures no hits."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
from starlette.responses import JSONResponse, Response

from jax_ragrl.config.schema import build
from jax_ragrl.corpus.passages import Corpus
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.base import search_pages
from jax_ragrl.retrieval.web import WebRetriever
from jax_ragrl.run.components import load_retriever
from jax_ragrl.run.config import Index, parse_index
from jax_ragrl.types import Passage
from tests.retrieval.engine import SIZE, engine, found, pages


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "secret")


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("serper", {"q": "a", "page": 1, "method": "POST", "key": "secret"}),
        (
            "searxng",
            {"q": "a", "format": "json", "pageno": "1", "method": "GET", "key": None},
        ),
    ],
)
def test_an_engine_is_asked_in_its_own_form(name: str, asked: dict[str, Any]):
    with engine(pages) as (address, seen):
        web = WebRetriever(name, f"{address}/search/")
        (hits,) = web.search(["a"], 2)
    assert seen == [asked] and web.fingerprint == address
    assert hits.passages[1] == Passage("http://a/1", "T http://a/1", "text of http://a/1")
    assert hits.scores == (1.0, 0.5) and len(hits.passages) == 2


@pytest.mark.parametrize(("name", "number"), [("serper", "page"), ("searxng", "pageno")])
def test_pages_are_turned_until_there_are_enough_hits_or_none_is_new(name: str, number: str):
    with engine(pages) as (address, seen):
        web = WebRetriever(name, address)
        assert web.search(["a"], SIZE) and len(seen) == 1
        deep = {k: web.search(["a"], k)[0].passages for k in (1, 3, 4, 9, 9)}
    assert [p.id for p in deep[9]] == [f"http://a/{n}" for n in range(5)]
    assert all(deep[k] == deep[9][:k] for k in deep)
    assert [int(asked[number]) for asked in seen] == [1, 2, 3]  # each once, for all depths


def test_an_engine_that_repeats_its_page_is_not_asked_for_ever():
    with engine(lambda asked: {"results": found(asked, 0, 2)}) as (address, seen):
        (hits,) = WebRetriever("searxng", address).search(["a"], 9)
    assert len(hits.passages) == 2 and len(seen) == 2


def test_what_was_found_is_kept_for_a_run_that_goes_on(tmp_path: pathlib.Path):
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
        beside = WebRetriever("searxng", address, folder)  # another process of the run
        assert beside.search(["a", "d"], 1) == again.search(["a", "d"], 1)
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


def test_a_query_that_finds_nothing_has_no_hits_and_one_that_was_refused_fails_alone():
    def reply(asked: dict[str, Any]) -> Any:
        if asked["q"] == "bad":
            return JSONResponse({"message": "no"}, 400)
        return {"results": []} if asked["q"] == "none" else pages(asked)

    with engine(reply) as (address, _):
        good, none, bad = WebRetriever("searxng", address).search(["good", "none", "bad"], 1)
    assert len(good.passages) == 1 and none.passages == ()
    assert isinstance(bad, EffectError) and "'bad' with 400" in str(bad)


def test_engines_behind_searxng_that_are_away_are_no_empty_page(tmp_path: pathlib.Path):
    away = {"results": [], "unresponsive_engines": [["google", "Suspended: CAPTCHA"]]}
    replies = iter([away])
    with engine(lambda asked: next(replies, None) or away | pages(asked)) as (address, _):
        web = WebRetriever("searxng", address, tmp_path)
        (error,) = web.search(["a"], 1)
        assert isinstance(error, EffectError) and "CAPTCHA" in str(error)
        # It was not kept as a page without hits; nor are hits of others lost.
        assert web.search(["a"], 1)[0].passages


def test_where_an_engine_is_away_the_queries_that_are_left_do_not_wait_for_it():
    with engine(lambda asked: Response("busy", 503)) as (address, seen):
        web = WebRetriever("searxng", address, retries=1, pause=0.05)
        errors = web.search([str(i) for i in range(100)], 1)
        assert all(isinstance(e, EffectError) and "failed 2 times" in str(e) for e in errors)
        assert 2 <= len(seen) <= 50  # eight at once, each twice; not 200
        before = len(seen)
        web.search(["again"], 1)
    assert len(seen) == before + 2


@pytest.mark.parametrize(
    ("name", "reply", "told"),
    [
        ("serper", Response('{"message": "Unauthorized."}', 403), "403.*SERPER_API_KEY right"),
        ("searxng", Response("Forbidden", 403), "403.*json under search.formats"),
        ("searxng", Response("<html>", 200), "<html>.*no list 'results'"),
        ("serper", JSONResponse({"results": []}), "no list 'organic'"),
        ("serper", JSONResponse([]), "no list 'organic'"),
    ],
)
def test_an_engine_that_never_found_anything_ends_the_run(name: str, reply: Response, told: str):
    with engine(lambda asked: reply) as (address, _):
        with pytest.raises(UserError, match=told) as refused:
            WebRetriever(name, address).search(["a", "b"], 1)
        assert address in str(refused.value) and "secret" not in str(refused.value)


def test_hits_without_an_address_are_none_and_titles_and_snippets_may_be_missing():
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


def test_a_run_keeps_what_an_engine_found_in_its_folder(tmp_path: pathlib.Path):
    with engine(pages) as (address, _):
        index = build(Index, {"kind": "searxng", "url": address})
        assert index == parse_index(f"searxng@{address}")
        (hits,) = load_retriever(Corpus(()), index, tmp_path).search(["a"], 1)
    (row,) = map(json.loads, (tmp_path / "index" / "searxng-0.jsonl").read_text().splitlines())
    assert row["query"] == "a" and row["hits"][0][0] == hits.passages[0].id == "http://a/0"


@pytest.mark.parametrize(
    ("kind", "url", "told"),
    [
        ("bing", "", "index.kind is 'bing': use one of exact, scann, remote, serper, searxng"),
        ("searxng", "", "index.kind is 'searxng' and index.url is ''"),
        ("remote", "", "index.kind is 'remote' and index.url is ''"),
        ("exact", "http://localhost:1", "index.kind is 'exact' and index.url is 'http"),
    ],
)
def test_a_kind_has_an_address_where_it_needs_one(kind: str, url: str, told: str):
    with pytest.raises(UserError, match=told):
        Index(kind=kind, url=url)
    assert Index(kind="serper").url == "" and parse_index("serper").kind == "serper"
    assert parse_index("http://me@host:1") == Index(kind="remote", url="http://me@host:1")


def test_a_key_is_read_without_the_end_of_its_line_and_shown_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("SERPER_API_KEY", " secret\n")
    with engine(pages) as (address, seen):
        WebRetriever("serper", address).search(["a"], 1)
    assert seen[0]["key"] == "secret"
    for broken in ("sec\u2019ret", "sec\nret"):
        monkeypatch.setenv("SERPER_API_KEY", broken)
        with pytest.raises(UserError, match="SERPER_API_KEY holds signs") as refused:
            WebRetriever("serper", "http://localhost:1")
        assert "sec" not in str(refused.value)


def test_pages_that_were_kept_do_not_speak_for_a_key_that_is_refused_now(tmp_path: pathlib.Path):
    with engine(pages) as (address, _):
        WebRetriever("serper", address, tmp_path).search(["a"], 1)
    with engine(lambda asked: Response("Unauthorized", 403)) as (address, _):
        again = WebRetriever("serper", address, tmp_path)
        assert again.search(["a"], 1)[0].passages
        with pytest.raises(UserError, match="SERPER_API_KEY right"):
            again.search(["a", "b"], 1)


@pytest.mark.parametrize("query", ["x" * 70_000, "\ud800"])
def test_a_query_that_no_request_can_hold_fails_alone(query: str):
    with engine(pages) as (address, _):
        good, bad = WebRetriever("searxng", address).search(["good", query], 1)
    assert good.passages and isinstance(bad, EffectError) and "cannot be asked this" in str(bad)


def test_an_engine_that_has_moved_says_where_to():
    moved = Response("", 301, headers={"Location": "https://elsewhere/search"})
    told = pytest.raises(UserError, match="with 301.*it is at https://elsewhere/search")
    with engine(lambda asked: moved) as (address, _), told:
        WebRetriever("searxng", address).search(["a"], 1)


def test_an_engine_that_only_ever_fails_is_not_taken_for_one_that_refuses():
    with engine(lambda asked: Response("broken", 500)) as (address, _):
        (error,) = WebRetriever("searxng", address, retries=0).search(["a"], 1)
    assert isinstance(error, EffectError) and "with 500, 'broken'" in str(error)


def test_an_engine_that_has_found_something_ends_no_run_where_credit_is_spent():
    replies = iter([pages, lambda asked: Response("spent", 403)])
    with engine(lambda asked: next(replies)(asked)) as (address, _):
        web = WebRetriever("serper", address)
        assert len(web.search(["a"], 1)[0].passages) == 1
        (error,) = web.search(["b"], 1)
    assert isinstance(error, EffectError) and "credit left" in str(error)
