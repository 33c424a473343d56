"""The page asks and shows answers without external resources, under a strict policy."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re

from jax_ragrl.serve.page import page


def test_the_policy_allows_the_page_and_nothing_else():
    reply = asyncio.run(page(None))
    policy, text = reply.headers["content-security-policy"], reply.body.decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_the_page_has_no_external_resources_and_sets_no_html():
    text = asyncio.run(page(None)).body.decode()
    assert not re.findall(r"https?:|//[a-z]|@import|<img|<iframe", text.replace("// ", ""))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.findall(r"\son\w+=|style=", text), "inline handlers and styles are blocked"
