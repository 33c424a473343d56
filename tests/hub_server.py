"""A server on this machine that speaks the Hugging Face Hub's protocol, downloads and uploads.

Downloads run in separate processes: `huggingface_hub` reads its environment when it
is imported.
"""

import base64
import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_test"
USER = "owner"  # the user of the token, who may write to no other name


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by name, each a folder; a data set is named `datasets/OWNER/NAME`.

    `gated` repositories ask for a token, `public` ones were made visible, `requests` are those
    made, and `reserved` names exist but belong to no model.
    """

    def __init__(self, folders: dict[str, pathlib.Path], gated: tuple[str, ...] = ()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders, self.gated = folders, gated
        self.requests: list[str] = []
        self.public, self.reserved = set(folders), set[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's protocol that a download and an upload of a folder need."""

    server: Hub

    def do_GET(self) -> None:  # noqa: N802
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.count("/") < 2:  # the client's own settings, no repository
            return self._refuse(404, "")
        self.server.requests.append(f"{self.command} {path}")
        api = path.startswith("api/")
        name, rest = repository_and_rest(path)
        if name not in self.server.folders:
            return self._refuse(404, "RepoNotFound")
        if name in self.server.gated and "Authorization" not in self.headers:
            return self._refuse(401 if api else 403, "GatedRepo")
        if rest[1:] and rest[1] not in ("main", COMMIT):
            return self._refuse(404, "RevisionNotFound")
        folder = self.server.folders[name]
        if not api:
            return self._send_file(folder / "/".join(rest[2:]))
        paths = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        names = [file.relative_to(folder).as_posix() for file in paths]
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": digest(file)}
                for name, file in zip(names, paths, strict=True)
            ]
            return self._send(json.dumps(tree).encode())
        siblings = [{"rfilename": name} for name in names]
        private = name not in self.server.public
        info = {"id": name, "modelId": name, "sha": COMMIT, "private": private}
        return self._send(json.dumps({**info, "siblings": siblings}).encode())

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:  # noqa: N802
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"POST {path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if path == "api/validate-yaml":
            return self._send(b"{}")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._refuse(401, "", "Invalid username or password.")
        if path == "api/repos/create":
            return self._create(json.loads(body))
        name, rest = repository_and_rest(path)
        if name not in self.server.folders:
            return self._refuse(404, "RepoNotFound")
        if rest[0] == "preupload":
            return self._choose_modes(json.loads(body)["files"])
        return self._commit(self.server.folders[name], body.decode())

    def _create(self, ask: dict) -> None:
        name = f"{ask['organization'] or USER}/{ask['name']}"
        if not name.startswith(f"{USER}/"):
            return self._refuse(403, "", "You don't have the rights to create a model here")
        address = {"url": f"{self.server.url}/{name}"}
        if name in self.server.folders or name in self.server.reserved:
            return self._send(json.dumps(address).encode(), code=409)
        folder = self.server.folders[next(iter(self.server.folders))].parent / f"hub/{name}"
        folder.mkdir(parents=True)
        self.server.folders[name] = folder
        if not (ask.get("private") or ask.get("visibility") == "private"):
            self.server.public.add(name)
        return self._send(json.dumps(address).encode())

    def _choose_modes(self, files: list[dict]) -> None:
        """Large files would travel apart, which is the work of the client alone."""
        mode = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
        self._send(json.dumps({"files": [{"path": x["path"]} | mode for x in files]}).encode())

    def _commit(self, folder: pathlib.Path, lines: str) -> None:
        for operation in map(json.loads, lines.splitlines()):
            value = operation["value"]
            if operation["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
        reply = {"commitUrl": f"{self.server.url}/{USER}/x/commit/{COMMIT}", "commitOid": COMMIT}
        self._send(json.dumps({**reply, "success": True}).encode())

    def _send_file(self, file: pathlib.Path) -> None:
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{digest(file)}"', "X-Repo-Commit": COMMIT}
        return self._send(file.read_bytes(), headers)

    def _send(self, body: bytes, headers: dict[str, str] | None = None, code: int = 200) -> None:
        self.send_response(code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, code: int, error: str, message: str = "") -> None:
        self.send_response(code)
        if error:
            self.send_header("X-Error-Code", error)
        self.send_header("X-Error-Message", message or error)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def repository_and_rest(path: str) -> tuple[str, list[str]]:
    """The repository that a path of the server names, as in `Hub`, and the parts after it."""
    parts = path.removeprefix("api/").removeprefix("models/").split("/")
    length = 3 if parts[0] == "datasets" else 2
    return "/".join(parts[:length]), parts[length:]


def digest(file: pathlib.Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving(folders: dict[str, pathlib.Path], gated: tuple[str, ...] = ()) -> Iterator[Hub]:
    """A Hub with these repositories."""
    server = Hub(folders, gated)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_with_hub(
    arguments: list[str], home: pathlib.Path, url: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Python with `arguments`, in a process whose Hub is at `url` and whose cache is in `home`."""
    settings = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | settings | environ,
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
