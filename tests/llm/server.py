"""A small OpenAI-compatible server in a thread, for tests; `python -m tests.llm.server` runs it."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Reply = Callable[[Mapping[str, Any]], str | int | bytes]

REFUSAL = {"error": {"message": "refused"}}


def echo(body: Mapping[str, Any]) -> str:
    """The first line of the prompt."""
    return body["messages"][-1]["content"].partition("\n")[0]


@contextlib.contextmanager
def serving(reply: Reply = echo, port: int = 0) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    """The address to give as `base_url`, and the requests so far.

    `reply` maps a request to the text of its answer, to an HTTP status that refuses it, or to the
    bytes that are sent instead of a completion.
    """
    seen: list[Mapping[str, Any]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append(body)
            said = reply(body)
            value = completion(body, said) if isinstance(said, str) else REFUSAL
            data = said if isinstance(said, bytes) else json.dumps(value).encode()
            self.send_response(said if isinstance(said, int) else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


def completion(body: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """A chat completion as servers write it."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
    return {**head, "choices": [choice], "usage": usage}


if __name__ == "__main__":
    with serving(port=8765) as (address, _):
        print(address, flush=True)
        threading.Event().wait()
