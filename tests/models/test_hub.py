"""Models on the Hub, from a server on this machine that speaks the Hub's protocol.

Each download is a process of its own: `huggingface_hub` reads its environment when it is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.models import by_name, hub

GOLDEN = pathlib.Path(__file__).parent / "golden" / "qwen3"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "owner/model"


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by name, each a folder; `gated` asks for a token, `requests` are those made."""

    def __init__(self, folders: dict[str, pathlib.Path], gated: tuple[str, ...] = ()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folders, self.gated = folders, gated
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    """The part of the Hub's protocol that a download needs."""

    server: Hub

    def do_GET(self) -> None:  # noqa: N802
        path = unquote(urlsplit(self.path).path).strip("/")
        self.server.requests.append(f"{self.command} {path}")
        api = path.startswith("api/models/")
        owner, model, *rest = path.removeprefix("api/models/").split("/")
        name = f"{owner}/{model}"
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
        if rest[0] == "tree":
            tree = [
                {"type": "file", "path": name, "size": file.stat().st_size, "oid": digest(file)}
                for name, file in zip(names, paths, strict=True)
            ]
            return self._send(json.dumps(tree).encode())
        siblings = [{"rfilename": name} for name in names]
        info = {"id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings}
        return self._send(json.dumps(info).encode())

    do_HEAD = do_GET  # noqa: N815

    def _send_file(self, file: pathlib.Path) -> None:
        if not file.is_file():
            return self._refuse(404, "EntryNotFound")
        headers = {"ETag": f'"{digest(file)}"', "X-Repo-Commit": COMMIT}
        return self._send(file.read_bytes(), headers)

    def _send(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, code: int, error: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", error)
        self.send_header("X-Error-Message", error)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


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


@pytest.fixture
def repository(tmp_path) -> pathlib.Path:
    """A model folder with more in it than a download needs."""
    folder = tmp_path / "repository"
    shutil.copytree(GOLDEN, folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "merges.txt").write_text("a b")
    for extra in ("README.md", "pytorch_model.bin", "model.gguf", "onnx/model.safetensors"):
        (folder / extra).parent.mkdir(exist_ok=True)
        (folder / extra).write_text("not needed")
    return folder


SCRIPT = """
import sys
from jax_ragrl.errors import UserError
from jax_ragrl.models.by_name import resolve_model
try:
    print(resolve_model(sys.argv[1], weights=sys.argv[2] == "True"))
except UserError as error:
    sys.exit(f"error: {error}")
"""


def resolve(
    name: str, home: pathlib.Path, url: str, *, weights: bool = True, **environ: str
) -> subprocess.CompletedProcess[str]:
    """`resolve_model` in a process of its own, with a cache in `home`."""
    settings = {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": "",
    }
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(weights)],
        env=os.environ | settings | environ,
        cwd=pathlib.Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_model_is_downloaded_once_and_only_the_files_it_needs(repository, tmp_path):
    with serving({NAME: repository}) as server:
        done = resolve(NAME, tmp_path / "home", server.url)
        assert done.returncode == 0, done.stderr
        folder = pathlib.Path(done.stdout.strip())
        present = {file.relative_to(folder).as_posix() for file in folder.rglob("*")}
        assert present == {
            "config.json",
            "merges.txt",
            "model.safetensors",
            "tokenizer_config.json",
        }
        assert "100%" in done.stderr  # a progress bar
        server.requests.clear()
        again = resolve(NAME, tmp_path / "home", server.url)
        assert again.stdout == done.stdout and again.stderr == ""
        assert server.requests == []
    weights = (folder / "model.safetensors").read_bytes()
    assert weights == (GOLDEN / "model.safetensors").read_bytes()
    offline = resolve(NAME, tmp_path / "home", server.url, HF_HUB_OFFLINE="1")
    assert offline.stdout == done.stdout


def test_a_config_is_read_without_weights_which_follow_when_they_are_needed(repository, tmp_path):
    with serving({NAME: repository}) as server:
        done = resolve(f"{NAME}@main", tmp_path / "home", server.url, weights=False)
        folder = pathlib.Path(done.stdout.strip())
        assert (folder / "config.json").is_file()
        assert not (folder / "model.safetensors").exists()
        done = resolve(f"{NAME}@{COMMIT}", tmp_path / "home", server.url)
        assert pathlib.Path(done.stdout.strip()) == folder
        assert (folder / "model.safetensors").is_file()


def test_a_tokenizer_that_another_tool_did_not_download_is_added(repository, tmp_path):
    with serving({NAME: repository}) as server:
        done = resolve(NAME, tmp_path / "home", server.url)
        folder = pathlib.Path(done.stdout.strip())
        (folder / "tokenizer_config.json").unlink()
        resolve(NAME, tmp_path / "home", server.url)
    assert (folder / "tokenizer_config.json").is_file()


def test_of_a_sharded_model_the_files_of_its_index_are_downloaded(repository, tmp_path):
    (repository / "model.safetensors").rename(repository / "part-1.safetensors")
    (repository / "consolidated.safetensors").write_text("not needed")
    index = {"weight_map": {"model.norm.weight": "part-1.safetensors"}}
    (repository / hub.INDEX).write_text(json.dumps(index))
    with serving({NAME: repository}) as server:
        done = resolve(NAME, tmp_path / "home", server.url)
    files = {file.name for file in pathlib.Path(done.stdout.strip()).glob("*.safetensors")}
    assert files == {"part-1.safetensors"}


def test_a_gated_model_needs_a_token(repository, tmp_path):
    with serving({NAME: repository}, gated=(NAME,)) as server:
        refused = resolve(NAME, tmp_path / "home", server.url)
        accepted = resolve(NAME, tmp_path / "home", server.url, HF_TOKEN="hf_test")
    assert refused.stderr.splitlines()[-1] == (
        f"error: {NAME} is gated: ask for access at {server.url}/{NAME}, then set HF_TOKEN or run "
        "'hf auth login'"
    )
    assert accepted.returncode == 0, accepted.stderr


@pytest.mark.parametrize(
    ("name", "environ", "words"),
    [
        ("owner/absent", {}, "neither a folder on this machine nor a model on http"),
        (f"{NAME}@v9", {}, f"{NAME} on the Hub has no revision 'v9': give a branch"),
        (NAME, {"HF_HUB_OFFLINE": "1"}, "and HF_HUB_OFFLINE is set: unset it"),
        (NAME, {"HF_ENDPOINT": "http://127.0.0.1:9"}, "failed (ConnectError"),
        ("owner/adapter", {}, "has no model.safetensors: it is an adapter"),
        ("owner/files", {}, "has no config.json; for a repository of GGUF files"),
    ],
)
def test_what_cannot_be_downloaded_says_why_on_one_line(name, environ, words, repository, tmp_path):
    adapter, files = tmp_path / "adapter", tmp_path / "files"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    files.mkdir()
    (files / "model.gguf").write_text("")
    folders = {NAME: repository, "owner/adapter": adapter, "owner/files": files}
    with serving(folders) as server:
        done = resolve(name, tmp_path / "home", server.url, **environ)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and words in last, done.stderr


def test_a_full_disk_says_so_and_where_the_cache_is(monkeypatch):
    import huggingface_hub

    def full(*_: object, **options: object) -> str:
        if options.get("local_files_only"):
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing here")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(UserError, match="no space left for owner/model in .*: free some, or set"):
        by_name.resolve_model(NAME)


def test_a_folder_of_this_machine_comes_before_a_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert by_name.resolve_model(NAME) == pathlib.Path(NAME)
