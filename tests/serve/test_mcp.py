"""The tools for agents, called by the real client of the Model Context Protocol."""

import json
import sys
from typing import Any

import anyio
import httpx2
import pytest

mcp = pytest.importorskip("mcp", reason="not installed: mcp")

from jax_ragrl.cli.main import main  # noqa: E402
from jax_ragrl.errors import UserError  # noqa: E402
from jax_ragrl.serve import app, search  # noqa: E402
from jax_ragrl.serve import mcp as tools  # noqa: E402
from jax_ragrl.serve.access import Settings  # noqa: E402
from jax_ragrl.serve.bodies import MAX_BYTES, MAX_CHARACTERS  # noqa: E402
from jax_ragrl.serve.replies import ServedSystem  # noqa: E402
from jax_ragrl.systems.baselines.standard import StandardRAG  # noqa: E402
from tests.listening import listening  # noqa: E402
from tests.rollout.tape import Tape  # noqa: E402
from tests.serve.stub import Echo  # noqa: E402

KEY = "k" * 32


def calls(server: Any, *requests: tuple[str, dict[str, Any]]) -> tuple[list[str], list[Any]]:
    """The names of a server's tools, and the result of each call."""

    async def run() -> tuple[list[str], list[Any]]:
        async with mcp.Client(server) as client:
            names = [tool.name for tool in (await client.list_tools()).tools]
            return names, [await client.call_tool(*request) for request in requests]

    return anyio.run(run)


def message(result: Any) -> str:
    assert result.is_error
    return result.content[0].text


def test_a_retriever_is_searched_over_http_within_its_limits():
    settings = Settings(mcp="http")
    with listening(search.application(Echo(), settings=settings)) as address:
        names, results = calls(
            f"{address}/mcp",
            ("search", {"query": "Ulm", "k": 2}),
            ("search", {"query": "Ulm"}),
            ("search", {"query": "Ulm", "k": 1001}),
        )
    assert names == ["search"]
    hit = {"id": "0", "title": "Ulm", "text": "x", "score": 1.0}
    assert results[0].structured_content == {"result": [hit, hit | {"id": "1"}]}
    assert len(results[1].structured_content["result"]) == search.TOP_K
    assert "topk is 1001: give a number from 1 to 1000" in message(results[2])


def test_a_system_answers_and_a_failure_is_told():
    def reply(request: Any) -> str:
        if "Zoe" in request.messages[-1].content:
            raise RuntimeError("a bug")
        return "in Ulm"

    environment = Tape({}, replies={"answer": reply}).environment()
    served = ServedSystem("tape", "a stub", StandardRAG("c3po_tiny", 2), environment, "Where?")
    with listening(app.application(served, settings=Settings(mcp="http"))) as address:
        names, results = calls(
            f"{address}/mcp",
            ("answer", {"question": "Where was Ann born?"}),
            ("answer", {"question": "Where was Ann born?", "passages": True}),
            ("answer", {"question": "x" * (MAX_CHARACTERS + 1)}),
            ("answer", {"question": "Where was Zoe born?"}),
            ("search", {"query": "Ann"}),
        )
    assert names == ["search", "answer"]
    expected = {"question": "Where was Ann born?", "answer": "in Ulm", "why": "answered"}
    assert results[0].structured_content == expected
    assert len(results[1].structured_content["passages"]) == 2
    assert f"give {MAX_CHARACTERS} at most" in message(results[2])
    assert "this failed: RuntimeError: a bug" in message(results[3])
    assert len(results[4].structured_content["result"]) == 2


def test_keys_names_and_sizes_are_those_of_the_server():
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    send = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
    key = {"Authorization": f"Bearer {KEY}"}
    with listening(search.application(Echo(), settings=Settings(mcp="http", keys=(KEY,)))) as at:

        def status(headers: dict[str, str], content: str = json.dumps(body)) -> int:
            return httpx2.post(f"{at}/mcp", content=content, headers=send | headers).status_code

        assert status({}) == 401 and status(key) == 200
        assert status(key | {"Host": "evil.example"}) == 400
        assert status(key, " " * (MAX_BYTES + 1)) == 413
        assert status(key | {"Content-Type": "text/plain"}) == 400
        assert httpx2.post(f"{at}/retrieve", json={"queries": []}, headers=key).status_code == 200
    with listening(search.application(Echo())) as at:
        assert httpx2.post(f"{at}/mcp", json=body).status_code == 404


def test_a_late_search_is_refused_at_the_deadline():
    limits = search.LIMITS._replace(seconds=0.2)
    app = search.application(Echo(seconds=1.5), limits=limits, settings=Settings(mcp="http"))
    with listening(app) as address:
        _, (result,) = calls(f"{address}/mcp", ("search", {"query": "Ulm"}))
    assert "took longer than 0.2 seconds: try again later" in message(result)


@pytest.mark.slow
def test_a_command_serves_an_index_on_the_standard_streams(tmp_path):
    rows = [{"id": n, "title": n, "text": f"{n} lies on the Danube"} for n in ("Ulm", "Linz")]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    folder = str(tmp_path / "index")
    assert main(["data", "index", "--corpus", str(corpus), "--out", folder, "--kind", "bm25"]) == 0
    arguments = ["-m", "jax_ragrl", "serve", "retriever", folder, "--mcp", "stdio"]
    server = mcp.StdioServerParameters(command=sys.executable, args=arguments)
    names, (result,) = calls(server, ("search", {"query": "Linz", "k": 1}))
    assert names == ["search"]
    assert [hit["title"] for hit in result.structured_content["result"]] == ["Linz"]


def test_another_version_of_the_package_is_named(monkeypatch):
    monkeypatch.setattr(tools.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs version 2 of the package mcp: 'pip install"):
        tools.check_package()
