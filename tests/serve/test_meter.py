"""Metrics count every request."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from jax_ragrl.serve.meter import Meter
from jax_ragrl.serve.search import application
from tests.serve.stub import Echo


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
