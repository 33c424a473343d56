"""The page at `/`: one HTML file without external resources, under a strict policy."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import re

from starlette.requests import Request
from starlette.responses import HTMLResponse


@functools.cache
def load_page() -> HTMLResponse:
    """The page that asks questions; it may use its own style and script, and ask this server."""
    text = importlib.resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    rules = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
    rules += "form-action 'none'; frame-ancestors 'none'"
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules += f"; {tag}-src 'sha256-{digest}'"
    headers = {
        "Content-Security-Policy": rules,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


async def page(request: Request) -> HTMLResponse:
    return load_page()
