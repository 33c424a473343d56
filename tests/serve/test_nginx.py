"""nginx with launch/nginx.conf keeps hostile clients away from a server and changes no reply."""

import asyncio
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route

from jax_ragrl.serve.access import Settings
from tests.listening import listening
from tests.serve.stub import Echo, accepts, connect, request, search, serving, status, wait_until

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + ":/usr/sbin")
CONF = pathlib.Path(__file__).parents[2] / "launch" / "nginx.conf"
KEY = "0123456789abcdef"
TEMPORARY = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")

pytestmark = pytest.mark.skipif(
    not NGINX, reason="nginx is not installed (Debian and Ubuntu: apt install nginx-light)"
)


@contextlib.contextmanager
def nginx(
    folder: pathlib.Path, port: int, changes: Mapping[str, str] = MappingProxyType({})
) -> Iterator[int]:
    """Yields the port of an nginx in front of the server at `port`.

    Args:
      folder: for its files.
      port: of the server.
      changes: texts in place of those of launch/nginx.conf.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = listener.getsockname()[1]
    text = CONF.read_text()
    # The workers of root belong to another user, who may not read the folder of a test.
    user = "user root; " if os.geteuid() == 0 else ""
    places = {
        "worker_processes auto": f"daemon off; {user}worker_processes 1",
        "listen 80": f"listen 127.0.0.1:{own}",
        "server_name rag.example.org": "server_name localhost 127.0.0.1",
        "127.0.0.1:8000": f"127.0.0.1:{port}",
        "/run/nginx.pid": f"{folder}/pid",
        "/var/log/nginx/ragrl.jsonl": f"{folder}/access.jsonl",
        "http {": "http {" + "".join(f"{x}_temp_path {folder}/{x};" for x in TEMPORARY),
    }
    for old, new in (places | {**changes}).items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    command = [NGINX, "-c", f"{folder}/nginx.conf", "-e", f"{folder}/errors"]
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: accepts(own) or process.poll() is not None)
            assert process.poll() is None, (folder / "errors").read_text()
            yield own
        finally:
            process.terminate()


def client(port: int, **options) -> httpx2.Client:
    return httpx2.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, **options)


IMPATIENT = {
    "client_header_timeout 10s": "client_header_timeout 1s",
    "client_body_timeout 30s": "client_body_timeout 1s",
}


def test_slow_clients_are_cut_and_others_answered(tmp_path):
    echo = Echo()
    with serving(echo) as (port, server), nginx(tmp_path, port, IMPATIENT) as front:
        silent, slow = connect(front), connect(front, b"POST /retrieve HTTP/1.1\r\nX: ")
        held = connect(front, request(b"{", 1000))
        assert status(connect(front, search("q"))) == 200
        with pytest.raises(ConnectionError):  # a byte now and then does not keep it alive
            while True:
                slow.sendall(b"x")
                time.sleep(0.2)
        assert (status(silent), status(held)) == (0, 0)
        assert not server.server_state.connections, "the server has seen none of them"


def test_a_large_body_is_refused_by_its_length_and_by_its_size(tmp_path):
    with serving(Echo()) as (port, _), nginx(tmp_path, port) as front:
        assert status(connect(front, request(b"{", (1 << 22) + 1))) == 413
        assert status(connect(front, request(b" " * (1 << 22)))) == 400, "blank, but not too large"
        with client(front) as http:
            reply = http.post("/retrieve", json={"queries": ["q" * (1 << 22)]})
            assert reply.status_code == 413 and "4 MiB" in reply.json()["error"]["message"]
            assert "retry-after" not in reply.headers


def test_a_client_beyond_its_rate_is_refused_and_others_are_not(tmp_path):
    changes = {"rate=50r/s": "rate=1r/m", "burst=100": "burst=2"}
    with serving(Echo()) as (port, _), nginx(tmp_path, port, changes) as front:
        with client(front) as http:
            replies = [http.post("/retrieve", json={"queries": ["q"]}) for _ in range(4)]
        assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
        assert replies[3].json()["error"]["code"] == 429 and replies[3].headers["retry-after"]
        transport = httpx2.HTTPTransport(local_address="127.0.0.2")
        with client(front, transport=transport) as http:
            assert http.post("/retrieve", json={"queries": ["q"]}).status_code == 200


def test_a_client_has_a_number_of_requests_at_once(tmp_path):
    echo = Echo(seconds=1.0)
    changes = {"limit_conn requests 64": "limit_conn requests 2"}
    with serving(echo) as (port, _), nginx(tmp_path, port, changes) as front:
        first = [connect(front, search("a")), connect(front, search("b"))]
        wait_until(lambda: "a" in echo.queries)
        assert status(connect(front, search("c"))) == 429
        assert [status(connection) for connection in first] == [200, 200]
        wait_until(lambda: status(connect(front, search("c"))) == 200)


def test_events_arrive_before_the_next_is_sent(tmp_path):
    read = [threading.Event() for _ in range(3)]

    async def answer(request):
        async def events():
            for number, event in enumerate(read):
                yield f"data: {number}\n\n"
                assert await asyncio.to_thread(event.wait, 20)

        return StreamingResponse(events(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    with (
        listening(app) as address,
        nginx(tmp_path, int(address.rpartition(":")[2])) as front,
        client(front) as http,
        http.stream("POST", "/v1/chat/completions") as reply,
    ):
        for event, part in zip(read, reply.iter_text(), strict=True):
            assert not event.is_set() and part == f"data: {read.index(event)}\n\n"
            event.set()


def test_keys_are_checked_and_metrics_are_not_public(tmp_path):
    with serving(Echo(), Settings(keys=(KEY,))) as (port, _), nginx(tmp_path, port) as front:
        with client(front) as http:
            assert http.post("/retrieve", json={"queries": ["q"]}).status_code == 401
            http.headers["X-API-Key"] = KEY
            assert http.post("/retrieve", json={"queries": ["q"]}).status_code == 200
            for path in ("/metrics", "//metrics", "/%6detrics", "/x/../metrics", "/metrics/"):
                assert http.get(path).status_code == 404
        with client(port, headers={"X-API-Key": KEY}) as http:
            assert 'ragrl_requests_total{path="/metrics"' not in http.get("/metrics").text


def test_other_hosts_and_a_request_with_two_lengths_reach_no_server(tmp_path):
    echo = Echo()
    with serving(echo) as (port, _), nginx(tmp_path, port) as front:
        other = search("evil").replace(b"localhost", b"evil.example")
        assert status(connect(front, other)) == 0
        head, _, body = search("two").partition(b"\r\n\r\n")
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        both = head + b"\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks
        connection = connect(front, both + search("q"))
        replies = b"".join(iter(lambda: connection.recv(4096), b""))
        assert replies.startswith(b"HTTP/1.1 400") and replies.count(b"HTTP/1.1") == 1
    assert not {"evil", "two", "q"} & {*echo.queries}


def test_a_server_that_does_not_run_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with nginx(tmp_path, port) as front, client(front) as http:
        reply = http.get("/health")
        assert reply.status_code == 502 and "does not run" in reply.json()["error"]["message"]


def test_replies_are_those_of_the_server(tmp_path):
    bodies = [{"queries": [f"{n}"] * n, "topk": n, "return_scores": n > 9} for n in range(1, 70)]
    bodies += [{}, {"queries": 1}, {"queries": ["q"], "topk": 0}, ["q"], {"queries": ["q"] * 5000}]
    with (
        serving(Echo()) as (port, _),
        nginx(tmp_path, port) as front,
        client(port) as direct,
        client(front) as http,
        ThreadPoolExecutor(8) as pool,
    ):
        wait_until(lambda: direct.get("/health").status_code == 200)
        expected = [direct.post("/retrieve", json=body) for body in bodies]
        replies = [*pool.map(lambda body: http.post("/retrieve", json=body), bodies)]
    assert {reply.status_code for reply in replies} == {200, 400, 413}
    for reply, other in zip(replies, expected, strict=True):
        assert (reply.status_code, reply.content) == (other.status_code, other.content)
    lines = [json.loads(line) for line in (tmp_path / "access.jsonl").read_text().splitlines()]
    assert sum(line["request"].startswith("POST /retrieve") for line in lines) == len(bodies)
