"""The endpoints of a server as tools of the Model Context Protocol (MCP), for agents.

Over HTTP they are one more path of the server, with its keys, deadlines and queues. Over the
standard streams, an agent starts the server as a process of its own. Needs the package `mcp`.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.routing import Route

from jax_ragrl.errors import UserError
from jax_ragrl.runtime.progress import fall_silent
from jax_ragrl.serve import bodies, http
from jax_ragrl.serve.batcher import Batcher
from jax_ragrl.serve.replies import Answer, to_json
from jax_ragrl.types import Hits
from jax_ragrl.version import __version__

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

STDIO = "stdio"


def check_package() -> None:
    """Raises `UserError` unless version 2 of the package `mcp` is installed."""
    if not importlib.util.find_spec("mcp") or not importlib.util.find_spec("mcp.server.mcpserver"):
        raise UserError("--mcp needs version 2 of the package mcp: 'pip install \"mcp>=2\"'")


def tool_server(
    searches: Batcher[tuple[str, int], Hits],
    top_k: int,
    seconds: float | None,
    answers: Batcher[str, Answer] | None = None,
) -> MCPServer:
    """Returns a server with the tool `search` and, with a queue of questions, `answer`.

    Args:
      searches: the queue of queries, each with its number of passages.
      top_k: passages of a search that names no number.
      seconds: the deadline of a call.
      answers: the queue of questions.
    """
    from mcp.server.mcpserver import MCPServer
    from mcp_types import ToolAnnotations

    server = MCPServer("jax_ragrl", version=__version__, log_level="WARNING")
    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)

    async def search(query: str, k: int = top_k) -> list[dict[str, Any]]:
        """Searches a corpus; returns k passages with id, title, text and score, best first."""
        with _refusals():
            requests, _ = bodies.parse_search_request({"queries": [query], "topk": k}, top_k, 1)
            async with http.deadline(seconds, searches):
                (result,) = await http.results(searches, requests)
            hits = http.result_or_raise(result)
        pairs = zip(hits.passages, hits.scores, strict=True)
        return [{**passage._asdict(), "score": score} for passage, score in pairs]

    async def answer(question: str, passages: bool = False) -> dict[str, Any]:
        """Answers a question from a corpus; with passages, also returns what was read for it."""
        assert answers is not None
        with _refusals():
            text = bodies.parse_question(question)
            async with http.deadline(seconds, answers):
                (result,) = await http.results(answers, [text])
            return to_json(text, http.result_or_raise(result), False, passages)

    for tool in (search,) if answers is None else (search, answer):
        server.tool(annotations=reads)(tool)
    return server


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """The message of a refused request is what the agent reads."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except HTTPException as error:
        raise ToolError(error.detail) from error


def over_http(server: MCPServer) -> tuple[Sequence[Route], Any]:
    """The route `/mcp`, and a context in which it works.

    No call depends on an earlier one, so that clients leave nothing behind in the server.
    """
    from mcp.server.transport_security import TransportSecuritySettings

    app = server.streamable_http_app(
        stateless_http=True,
        json_response=True,
        max_request_body_size=bodies.MAX_BYTES,
        # The server around it checks names for all its paths.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    routes = [route for route in app.routes if isinstance(route, Route)]
    return routes, server.session_manager.run()


def over_stdio(server: MCPServer) -> None:
    """Serves on the standard streams until the input ends; other output goes to stderr."""
    fall_silent()
    server.run("stdio")
