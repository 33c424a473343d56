"""Who may ask a server: keys, names of hosts, types of content."""

import pytest
from starlette.testclient import TestClient

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.retrieval.remote import RemoteRetriever
from jax_ragrl.serve.access import Settings, check_access, read_keys
from jax_ragrl.serve.search import application
from jax_ragrl.types import Hits
from tests.serve.stub import Echo, serving

KEY, OTHER = "0123456789abcdef", "fedcba9876543210"


def client(**settings) -> TestClient:
    app = application(Echo(), settings=Settings(**settings))
    return TestClient(app, base_url="http://127.0.0.1:8000")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:8000"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "[::1]:8000"}, 200),
        ({"Host": "mine.example"}, 200),
        ({"Host": "a.wild.example"}, 200),
        ({"Host": "evil.example:8000"}, 400),
        ({"Host": "localhost.evil.example"}, 400),
        ({"Host": ""}, 400),
        ({"Host": "[::1"}, 400),
        ({"Origin": "http://["}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": ""}, 415),
    ],
)
def test_a_web_page_cannot_ask(headers, status):
    with client(hosts=("mine.example", "*.wild.example")) as http:
        reply = http.post("/retrieve", json={"queries": ["q"]}, headers=headers)
        # A page would have to ask for leave to send JSON to another site, and gets none.
        assert not {k for k in http.options("/retrieve").headers if k.startswith("access-control")}
    assert reply.status_code == status


@pytest.mark.parametrize(("hosts", "status"), [((), 200), (("mine.example",), 400)])
def test_a_server_for_other_machines_knows_every_name_unless_it_is_given_some(hosts, status):
    with client(host="0.0.0.0", keys=(KEY,), hosts=hosts) as http:
        headers = {"Host": "any.example", "X-API-Key": KEY}
        assert http.post("/retrieve", json={"queries": []}, headers=headers).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"bearer {OTHER}"}, 200),
        ({"X-API-Key": KEY}, 200),
        ({"Authorization": f"Bearer {KEY}0"}, 401),
        ({"Authorization": f"Bearer {KEY[:-1]}"}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": b"Bearer \xff\xfe"}, 401),
    ],
)
def test_a_request_needs_one_of_the_keys(headers, status):
    with client(keys=(KEY, OTHER)) as http:
        for path, body in (("/retrieve", {"queries": ["q"]}), ("/metrics", None)):
            method = "GET" if body is None else "POST"
            reply = http.request(method, path, json=body, headers=headers)
            assert reply.status_code == status
            assert status == 200 or reply.headers["www-authenticate"] == "Bearer"


def test_health_without_a_key_says_only_whether_the_server_is_ready():
    with client(keys=(KEY,)) as http:
        assert http.get("/health").json().keys() == {"ready"}
        assert "corpus" in http.get("/health", headers={"X-API-Key": KEY}).json()


def test_the_client_of_a_retriever_sends_its_key(monkeypatch):
    with serving(Echo(), Settings(keys=(KEY,))) as (port, _):
        (refusal,) = RemoteRetriever(f"http://127.0.0.1:{port}").search(["q"], 1)
        assert isinstance(refusal, EffectError) and "API key" in str(refusal)
        monkeypatch.setenv("RAGRL_RETRIEVER_KEY", f"{KEY}\n")  # as files of secrets end
        (hits,) = RemoteRetriever(f"http://127.0.0.1:{port}").search(["q"], 1)
        assert isinstance(hits, Hits)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "", "no.such.host.invalid"])
def test_other_machines_alone_need_a_key_unless_it_is_refused(host):
    with pytest.raises(UserError, match="--no-api-key"):
        check_access(Settings(host))
    check_access(Settings(host, keys=(KEY,)))
    check_access(Settings(host, is_open=True))
    for own in ("127.0.0.1", "localhost", "::1", "127.9.9.9"):
        check_access(Settings(own))


def test_keys_come_from_a_file_or_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# rotated in May\n{KEY}\n\n  {OTHER}\n")
    assert read_keys(file, {"RAGRL_API_KEY": "x" * 20}) == [KEY, OTHER]
    assert read_keys(None, {"RAGRL_API_KEY": f"{KEY}\n"}) == [KEY]
    assert read_keys(None, {}) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no API key"), ("short", "openssl"), (f"{KEY} {KEY}", "openssl"), ("é" * 20, "openssl")],
)
def test_keys_that_are_weak_are_refused_and_not_shown(tmp_path, text, message):
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as error:
        read_keys(file)
    assert not text or text not in str(error.value)
