"""The servers of the tests, and a language model that searches before it answers."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import httpx2

ROOT = pathlib.Path(__file__).parents[2]
URL = os.environ["RAGRL_URL"]
MIXTURE = os.environ["RAGRL_MIXTURE"]


def example(name: str, argument: str | pathlib.Path, **variables: str) -> list[str]:
    """Runs an example of the documentation; returns the lines that it prints."""
    command = [sys.executable, ROOT / "integrations" / "examples" / name, argument]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def post(path: str, body: Mapping[str, Any], url: str = URL) -> Any:
    """The JSON reply of a server to a request."""
    return httpx2.post(f"{url}{path}", json=body, timeout=300, trust_env=False).json()


def answer(question: str) -> str:
    """What the served system answers."""
    return post("/answer", {"question": question})["answer"]


def contents(query: str, k: int, url: str = URL) -> list[str]:
    """The passages that the server finds."""
    reply = post("/retrieve", {"queries": [query], "topk": k}, url)
    return [hit["contents"] for hit in reply["result"][0]]


def findable(golds: Mapping[str, str], url: str) -> list[float]:
    """1 for each question whose answer is in the three passages found for it, else 0."""
    return [float(gold in str(contents(text, 3, url))) for text, gold in golds.items()]


@contextlib.contextmanager
def searching_model(golds: Mapping[str, str]) -> Iterator[str]:
    """Yields the address of a model that calls the tool `search` with the question.

    It then gives the answer that it knows, if that is in what the tool returned: only a search that
    works earns a reward. A tool named `submit` receives the answer, if the agent has one.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            completion, stream = _completion(body, golds), body.get("stream")
            data = (_events(completion) if stream else json.dumps(completion)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if stream else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()


def _completion(body: Mapping[str, Any], golds: Mapping[str, str]) -> dict[str, Any]:
    texts = [str(message.get("content")) for message in body["messages"]]
    question = next(question for question in golds if any(question in text for text in texts))
    found = [x.get("content") for x in body["messages"] if x["role"] == "tool"]
    names = [tool["function"]["name"] for tool in body.get("tools", [])]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if not found:
        (name,) = (name for name in names if name.endswith("search"))
        message["tool_calls"] = [_call(name, query=question)]
    else:
        text = golds[question] if golds[question] in str(found[-1]) else "unknown"
        if "submit" in names:
            message["tool_calls"] = [_call("submit", answer=text)]
        else:
            message["content"] = text
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    head = {"id": "1", "object": "chat.completion", "created": 0, "model": "searching"}
    return {**head, "choices": [choice], "usage": usage}


def _events(completion: dict[str, Any]) -> str:
    """A completion as one server-sent event, and the end of the stream."""
    (choice,) = completion["choices"]
    choice["delta"] = choice.pop("message")
    for n, call in enumerate(choice["delta"].get("tool_calls", [])):
        call["index"] = n
    event = json.dumps(completion | {"object": "chat.completion.chunk"})
    return f"data: {event}\n\ndata: [DONE]\n\n"


def _call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{name}", "type": "function", "function": function}
