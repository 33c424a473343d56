"""A served report follows its run, and pages load nothing from elsewhere."""

import asyncio
import base64
import hashlib
import json
import pathlib
import re
import subprocess
import urllib.error
import urllib.request

import pytest

from jax_ragrl.serve.live import application
from jax_ragrl.serve.page import page
from tests.listening import listening
from tests.report.test_explorer import CHROMIUM

ATTACK = "</script><img src=x onerror=alert(1)>"


def log(run: pathlib.Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"step": step, "reward/mean": step / 10}) + "\n")


def get(address: str, **headers: str) -> tuple[str, dict[str, str]]:
    request = urllib.request.Request(address, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return reply.read().decode(), dict(reply.headers)


def refusal(address: str, **headers: str) -> int:
    with pytest.raises(urllib.error.HTTPError) as error:
        get(address, **headers)
    return error.value.code


@pytest.fixture
def run(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def test_the_page_follows_the_run_from_before_its_first_step(run):
    with listening(application([run])) as address:
        first = get(f"{address}/version")[0]
        assert "Nothing to show yet" in get(address)[0]
        log(run, 1)
        log(run, 2)
        second = get(f"{address}/version")[0]
        page = get(address)[0]
        assert second != first and f'data-version="{second}"' in page
        assert "Nothing to show yet" not in page and "Mean reward of all leaves" in page
        assert get(f"{address}/version")[0] == second
        log(run, 3)
        assert get(address)[0] != page


def test_predictions_are_shown_once_there_are_some(run):
    with listening(application([run])) as address:
        assert refusal(f"{address}/explorer") == 404
        assert 'href="explorer"' not in get(address)[0]
        (run / "predictions").mkdir()
        row = {"id": "q", "question": ATTACK, "answer": "a", "gold": ["a"], "scores": {"f1": 1.0}}
        row |= {"hops": 1, "kind": "", "gold_passages": [], "costs": {}, "finish_reason": ""}
        row |= {"strategy": "", "faults": [], "steps": [], "passages": []}
        (run / "predictions" / "dev.jsonl").write_text(json.dumps(row) + "\n")
        assert 'href="explorer"' in get(address)[0]
        page = get(f"{address}/explorer")[0]
        assert '"sources":["dev"]' in page and "<img" not in page


def test_only_the_script_of_the_page_may_run(run):
    log(run, 1)
    with listening(application([run])) as address:
        page, headers = get(address)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert len(scripts) == page.count("<script") == 1
    assert f"script-src 'sha256-{digest}'; connect-src 'self'" in page
    assert "default-src 'none'" in page and "innerHTML" not in scripts[0]
    assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
    assert headers["content-security-policy"] == "frame-ancestors 'none'"


def test_pages_of_other_sites_are_refused(run):
    with listening(application([run])) as address:
        for path in ("", "/version", "/explorer"):
            assert refusal(f"{address}{path}", Host="evil.example") == 400
        assert refusal(f"{address}/config.json") == 404


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
def test_a_browser_shows_a_step_that_was_logged_after_it_opened_the_page(run):
    log(run, 1)
    log(run, 2)
    inner, steps = application([run]), [777]

    async def app(scope, receive, send):
        await inner(scope, receive, send)
        if scope.get("path") == "/" and steps:  # once, when the browser has the page
            log(run, steps.pop())

    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    with listening(app) as address:
        done = subprocess.run(
            [*command, "--virtual-time-budget=9000", address],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert "step 777<" in done.stdout and re.search(r'id="live"[^>]*>live, ', done.stdout)


def test_the_page_of_questions_allows_its_own_parts_alone_and_sets_no_html():
    reply = asyncio.run(page(None))
    policy, text = reply.headers["content-security-policy"], reply.body.decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not re.findall(r"https?:|//[a-z]|@import|<img|<iframe", text.replace("// ", ""))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    assert not re.findall(r"\son\w+=|style=", text), "inline handlers and styles are blocked"
