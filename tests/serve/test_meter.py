"""Metrics count every request; the access log has one harmless line per request."""

from __future__ import annotations

import json
import os

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from jax_ragrl.errors import UserError
from jax_ragrl.serve.http import Settings
from jax_ragrl.serve.meter import Meter, access_line, open_log
from jax_ragrl.serve.search import application
from tests.serve.stub import Echo


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels."""
    families = text_string_to_metric_families(text)
    return {(s.name, *s.labels.values()): s.value for f in families for s in f.samples}


def test_metrics_count_requests_by_path_and_status():
    with TestClient(application(Echo())) as http:
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
    meter = Meter([])
    meter.count_answer([{"role": "search"}, {"role": "answer"}, {"role": "search"}], (7, 2))
    values = {
        (s.name, *s.labels.values()): s.value for f in meter._registry.collect() for s in f.samples
    }
    assert values["ragrl_steps_total", "search"] == 2
    assert values["ragrl_tokens_total", "prompt"] == 7
    assert values["ragrl_tokens_total", "completion"] == 2


@pytest.mark.parametrize("log_texts", [False, True])
def test_the_access_log_has_texts_only_on_request(tmp_path, log_texts):
    file = tmp_path / "log.jsonl"
    settings = Settings(access_log=str(file), log_texts=log_texts)
    with TestClient(application(Echo(), settings=settings)) as http:
        http.post("/retrieve", json={"queries": ["secret", "b"]})
        http.post("/retrieve", content=b"{")
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["status"], first["queries"], second["status"]) == (200, 2, 400)
    assert first.get("texts") == (["secret", "b"] if log_texts else None)
    assert "secret" not in file.read_text() or log_texts
    assert first.keys() >= {"time", "client", "method", "path", "seconds"}


def test_control_characters_are_escaped_in_the_access_log():
    scope = {
        "method": "GET",
        "path": "/\x1b[2J\n{}\r\x7f\x9b\u2028" + "x" * 999,
        "client": ("::1", 1),
        "state": {"facts": {"texts": ["\x1b]0;title\x07"]}},
    }
    line = access_line(scope, 404, 0.5)
    assert line.isascii() and line.isprintable() and len(line) < 600
    assert json.loads(line)["path"].startswith("/\x1b[2J\n{}\r\x7f\x9b\u2028xxx")


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path):
    assert open_log("") is None
    with pytest.raises(UserError, match="name a file"):
        open_log(str(tmp_path))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")
def test_a_full_disk_under_the_access_log_is_one_warning_and_no_failed_request(capsys):
    with TestClient(application(Echo(), settings=Settings(access_log="/dev/full"))) as http:
        replies = [http.post("/retrieve", json={"queries": ["q"]}) for _ in range(5)]
    assert [reply.status_code for reply in replies] == [200] * 5
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "cannot write the access log /dev/full" in lines[0]


def test_a_log_whose_folder_has_gone_is_a_warning_each_time_that_lines_begin_to_be_lost(
    tmp_path, capsys
):
    write = (
        open_log(str(tmp_path / "logs" / "log")) if (tmp_path / "logs").mkdir() is None else None
    )
    assert write is not None
    for _ in range(2):
        write("kept")
        (tmp_path / "logs").rename(tmp_path / "moved")
        write("lost")
        write("lost")
        (tmp_path / "moved").rename(tmp_path / "logs")
    write("kept")
    assert (tmp_path / "logs" / "log").read_text() == "kept\n" * 3
    assert capsys.readouterr().err.count("lines are lost") == 2
