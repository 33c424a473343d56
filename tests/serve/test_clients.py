"""A server without a proxy: bad, large, leaving and late requests harm no other, nor its end."""

import gc
import pathlib
import resource
import threading
import time

import httpx2
import pytest

from jax_ragrl.serve import http
from jax_ragrl.serve.access import Settings
from jax_ragrl.serve.bodies import MAX_BYTES
from tests.serve.stub import Echo, connect, hostile, request, search, serving, status, wait_until


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST /retrieve HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 17),
        request(b"{", length=-1),
        request(b"zz\r\n").replace(b"Content-Length: 4", b"Transfer-Encoding: chunked"),
    ],
)
def test_a_malformed_request_is_refused_and_the_next_is_answered(garbage, caplog):
    with serving(Echo()) as (port, _):
        connection = connect(port)
        try:
            connection.sendall(garbage)
            reply = connection.recv(1 << 16)
        except ConnectionError:  # it was closed with bytes unread
            reply = b"HTTP/1.1 400"
        assert reply.startswith(b"HTTP/1.1 400") and b"Traceback" not in reply
        assert status(connect(port, search("q"))) == 200
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("length", ["Content-Length: 1099511627776", "Transfer-Encoding: chunked"])
def test_a_large_body_is_refused_while_it_arrives_and_not_kept(length):
    part = b" " * (1 << 20)
    part = b"100000\r\n" + part + b"\r\n" if "chunked" in length else part
    with serving(Echo()) as (port, _):
        connection = connect(port, request(b"", 0).replace(b"Content-Length: 0", length.encode()))
        before = resident_bytes()
        for _ in range(1 + (MAX_BYTES >> 20)):
            connection.sendall(part)
        assert status(connection) == 413
        for _ in range(96):
            connection.sendall(part)
        assert resident_bytes() - before < 1 << 26
        assert status(connect(port, search("q"))) == 200


def resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def test_a_body_that_never_ends_is_refused_at_the_deadline_of_its_request():
    with serving(Echo(), seconds=0.3) as (port, _):
        assert status(connect(port, request(b"{", 1000))) == 503
        assert status(connect(port, search("q"))) == 200


def test_connections_have_a_limit():
    with serving(Echo(), Settings(connections=4)) as (port, server):
        idle = [connect(port) for _ in range(4)]
        wait_until(lambda: len(server.server_state.connections) == 4)
        assert status(connect(port, search("q"))) == 503
        for connection in idle:
            connection.close()
        wait_until(lambda: not server.server_state.connections)
        assert status(connect(port, search("q"))) == 200


def test_a_client_that_leaves_costs_no_search_and_no_line(caplog):
    echo = Echo(seconds=0.5)
    with serving(echo) as (port, _):
        first = connect(port, search("first"))
        wait_until(lambda: "first" in echo.queries)
        connect(port, search("left")).close()
        connect(port, request(b"{", 1000)).close()
        time.sleep(0.1)
        last = connect(port, search("last"))
        assert (status(first), status(last)) == (200, 200)
        with httpx2.Client(base_url=f"http://localhost:{port}", trust_env=False) as client:
            left = 'ragrl_requests_total{path="/retrieve",status="499"} 2.0'
            assert left in client.get("/metrics").text
        gc.collect()
    assert "left" not in echo.queries and not caplog.records


def test_a_server_ends_at_its_deadline_though_a_batch_hangs(monkeypatch, caplog):
    monkeypatch.setattr(http, "GRACE", 0.1)
    opened = threading.Event()
    echo = Echo()
    # With its results: an error after the test would be logged in the next one.
    echo.search = lambda queries, k: opened.wait(20) and Echo().search(queries, k)
    start = time.monotonic()
    with serving(echo, Settings(drain=1)) as (port, server):
        waiting = connect(port, search("q"))
        time.sleep(0.2)
        server.should_exit = True
        assert status(waiting) == 503
    assert not server.config.app.state.drained and time.monotonic() - start < 15
    assert "Traceback" not in caplog.text
    opened.set()


def test_good_clients_are_answered_beside_a_few_hostile_ones(caplog):
    work = hostile.ServeWork(seconds=1, clients=4, half_open=20, held=4, leaving=2, huge=1)
    with serving(Echo(0.1)) as (port, _):
        result = hostile.bench_serve(work, hostile.Target(f"http://127.0.0.1:{port}", "/retrieve"))
    assert result["good"].keys() == result["good_alone"].keys() == {"200"}
    # Of the process of this test, in which the server runs.
    assert result["rss_peak_bytes_ratio"] > 0.5 and result["server_s_per_reply_ratio"] > 0
    assert {"leaving: left", "huge: 413"} <= result["hostile"].keys()
    assert "Traceback" not in caplog.text
