"""Search servers behind a socket: an engine of the web, and a retriever."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.listening import listening

Reply = Callable[[dict[str, Any]], Any]
SIZE = 3  # hits of a page


def results(asked: dict[str, Any], first: int, number: int) -> list[dict[str, Any]]:
    """Hits of a page, under the names of both engines."""
    query = asked["q"]
    at = [f"http://{query}/{n}" for n in range(first, first + number)]
    texts = [{"snippet": f"text of {url}", "content": f"text of {url}"} for url in at]
    both = zip(at, texts, strict=True)
    return [{"title": f"T {url}", "link": url, "url": url} | text for url, text in both]


def pages(asked: dict[str, Any]) -> dict[str, Any]:
    """Two pages of hits: a whole one, and one that begins with the last hit of the one before."""
    page = int(asked.get("page") or asked["pageno"])
    hits = results(asked, (SIZE - 1) * (page - 1), SIZE) if page < 3 else []
    return {"organic": hits, "results": hits}


@contextlib.contextmanager
def engine(reply: Reply, path: str = "/search") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a server, and what it was asked, by method, key and port of the client."""
    seen: list[dict[str, Any]] = []

    async def search(request: Request) -> Response:
        asked = await request.json() if request.method == "POST" else dict(request.query_params)
        facts = {"method": request.method, "key": request.headers.get("X-API-KEY")}
        seen.append(asked | facts | {"port": request.client.port})
        made = await run_in_threadpool(reply, asked)
        return made if isinstance(made, Response) else Response(json.dumps(made))

    app = Starlette(routes=[Route(path, search, methods=["GET", "POST"])])
    with listening(app) as address:
        yield address, seen
