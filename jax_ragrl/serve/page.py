"""The page at `/`: one HTML file without external resources, under a strict policy."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re

from starlette.requests import Request
from starlette.responses import HTMLResponse


async def page(request: Request) -> HTMLResponse:
    """The page that asks questions."""
    return HTMLResponse(_text(), headers=_headers())


@functools.cache
def _text() -> str:
    return importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")


@functools.cache
def _headers() -> dict[str, str]:
    """Allows the page's own style and script, by their hashes, and requests to this server."""
    rules = [
        "default-src 'none'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    rules += ["frame-ancestors 'none'", *(_rule(tag) for tag in ("style", "script"))]
    return {
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _rule(tag: str) -> str:
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", _text(), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"{tag}-src 'sha256-{digest}'"
