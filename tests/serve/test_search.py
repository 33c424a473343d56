"""A retriever behind HTTP: its hits in any batch, its limits and its metrics."""

import contextlib
import pathlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from jax_ragrl.cli.main import main
from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.serve import search
from jax_ragrl.serve.http import Limits
from jax_ragrl.serve.meter import Meter
from jax_ragrl.serve.search import application
from jax_ragrl.types import Hits, Passage
from tests.listening import listening
from tests.serve.stub import Echo, wait_until


class Slow:
    """A retriever that waits until it is `opened`, and records the sizes of its searches."""

    fingerprint = "slow"

    def __init__(self, opened: bool = False) -> None:
        self.opened, self.is_waiting, self.sizes = threading.Event(), threading.Event(), []
        if opened:
            self.opened.set()

    def search(self, queries, k):
        if [*queries] != [search.WARMUP[0]]:
            self.sizes.append(len(queries))
            self.is_waiting.set()
            self.opened.wait(20)
        failure = EffectError("no route")
        return [failure if q == "bad" else self._hits(q, k) for q in queries]

    def _hits(self, query, k):
        passages = tuple(Passage(f"{query}{n}", "t", "x") for n in range(k))
        return Hits(passages, tuple(1.0 - n for n in range(k)))


@contextlib.contextmanager
def client(retriever, **settings):
    """Yields a client of a server whose first search has returned, so that no query joins it."""
    with TestClient(application(retriever, **settings), "http://localhost") as http:
        wait_until(lambda: http.get("/health").status_code == 200)
        yield http


def post(http: TestClient, *queries: str, **fields):
    return http.post("/retrieve", json={"queries": [*queries], **fields})


def test_concurrent_requests_share_a_search():
    slow = Slow()
    with client(slow, limits=Limits(4, 8)) as http, ThreadPoolExecutor(4) as pool:
        replies = [pool.submit(post, http, "a")]
        slow.is_waiting.wait(20)
        replies += [pool.submit(post, http, name, f"{name}{name}") for name in "bcd"]
        wait_until(lambda: http.get("/health").json()["waiting"] == 6)
        slow.opened.set()
        results = [reply.result().json()["result"] for reply in replies]
    assert slow.sizes == [1, 4, 2]
    assert [[d["id"] for d in hits] for result in results for hits in result] == [
        [f"{q}{n}" for n in range(search.TOP_K)] for q in ("a", "b", "bb", "c", "cc", "d", "dd")
    ]


def test_a_request_past_its_deadline_is_refused_and_not_searched():
    slow = Slow()
    with client(slow, limits=Limits(8, 8, 0.3)) as http, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, http, "a")
        slow.is_waiting.wait(20)
        late = post(http, "b")
        assert late.status_code == 503 and int(late.headers["retry-after"]) >= 1
        assert "longer than 0.3 seconds" in late.json()["error"]["message"]
        assert first.result().status_code == 503
        slow.opened.set()
        assert post(http, "c").status_code == 200
    assert slow.sizes == [1, 1], "nobody waits for b"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"queries": ["q"] * 3}, 413, "give 2 at most"),
        ({"queries": ["bad"]}, 500, "no route"),
        ({"queries": ["a", "bad"]}, 500, "no route"),
        ({"queries": ["bad", "bad"]}, 502, "no route"),
    ],
)
def test_limits_and_failures_have_a_status_and_a_reason(fields, status, message):
    with client(Slow(opened=True), limits=Limits(2, 2)) as http:
        reply = http.post("/retrieve", json=fields)
        assert reply.status_code == status and message in reply.json()["error"]["message"]
    with pytest.raises(UserError, match="k=0"):
        application(Slow(opened=True), top_k=0)


@pytest.mark.parametrize("queries", ["a bad b", "bad bad a b", "bad"])
def test_a_search_that_fails_costs_no_other_query_its_hits(queries):
    texts = queries.split()
    with listening(application(Slow(opened=True))) as address:
        outcomes = RemoteRetriever(address, retries=1, pause=0.01).search(texts, 1)
    assert [isinstance(x, EffectError) for x in outcomes] == [text == "bad" for text in texts]
    ids = [x.passages[0].id for x in outcomes if isinstance(x, Hits)]
    assert ids == [f"{text}0" for text in texts if text != "bad"]


def test_the_command_serves_the_index_of_a_folder(tmp_path: pathlib.Path, monkeypatch):
    assert main(["data", "world", "--size", "60", "--out", str(tmp_path)]) == 0
    index = ["--corpus", f"{tmp_path}/passages.jsonl", "--kind", "exact", "--out", f"{tmp_path}/i"]
    assert main(["data", "index", *index]) == 0
    served = []
    monkeypatch.setattr(search.http, "listen", lambda app, *_: served.append(app()))
    assert main(["serve", "retriever", f"{tmp_path}/i", "--port", "0", "--top-k", "2"]) == 0
    with TestClient(served[0], "http://localhost") as http:
        wait_until(lambda: http.get("/health").status_code == 200)
        assert http.get("/health").json()["passages"] > 20
        assert len(post(http, "Where was Ann born?").json()["result"][0]) == 2


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    families = text_string_to_metric_families(text)
    return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}


def test_metrics_count_requests_by_path_and_status():
    with TestClient(application(Echo()), "http://localhost") as http:
        for queries in (["q"], ["q"], "q"):
            http.post("/retrieve", json={"queries": queries})
        http.get("/no/such/path")
        reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    values = samples(reply.text)
    assert values["ragrl_requests_total", "/retrieve", "200"] == 2
    assert values["ragrl_requests_total", "/retrieve", "400"] == 1
    assert values["ragrl_requests_total", "other", "404"] == 1
    assert values["ragrl_request_seconds_count", "/retrieve"] == 3
    assert values["ragrl_requests_in_progress",] == 1, "the request for the metrics"
    assert values["ragrl_queue_items", "searches"] == 0
    assert values["process_resident_memory_bytes",] > 1e6


def test_answers_count_their_steps_and_tokens():
    meter = Meter([], {})
    meter.count_answer([{"role": "search"}, {"role": "answer"}, {"role": "search"}], (7, 2))
    values = {
        (s.name, *s.labels.values()): s.value for f in meter.registry.collect() for s in f.samples
    }
    assert values["ragrl_steps_total", "search"] == 2
    assert values["ragrl_tokens_total", "prompt"] == 7
    assert values["ragrl_tokens_total", "completion"] == 2
