"""A language model server of fixed replies, in place of vLLM in `launch/paper.sh PAPER --toy`.

python launch/stand_in.py http://localhost:PORT/v1
"""

import http.server
import json
import sys
import urllib.parse


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply({"data": [{"id": "stand-in"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_judge = "True or False" in body["messages"][-1]["content"]
        message = {"role": "assistant", "content": "True" if is_judge else "**Fennmark**"}
        usage = {"prompt_tokens": 10, "completion_tokens": 3}
        self.reply({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    def reply(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


if __name__ == "__main__":
    port = urllib.parse.urlsplit(sys.argv[1]).port
    http.server.ThreadingHTTPServer(("127.0.0.1", port or 8000), Handler).serve_forever()
