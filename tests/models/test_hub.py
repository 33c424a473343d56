"""Models on the Hub, from a server on this machine that speaks the Hub's protocol."""

import json
import pathlib
import re
import shutil
import subprocess

import pytest

from jax_ragrl.errors import UserError
from jax_ragrl.models import by_name, hub
from tests.hub_server import COMMIT, run_with_hub, serving

GOLDEN = pathlib.Path(__file__).parent / "golden" / "qwen3"
NAME = "owner/model"


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
for name in sys.argv[2:]:
    try:
        print(resolve_model(name, weights=sys.argv[1] == "True"))
    except UserError as error:
        print(f"error: {error}")
"""


def resolve(*names, home, url, weights=True, **environ) -> subprocess.CompletedProcess[str]:
    """`resolve_model` in a process of its own, with a cache in `home`."""
    return run_with_hub(["-c", SCRIPT, str(weights), *names], home, url, **environ)


@pytest.mark.slow
def test_a_model_is_downloaded_once_and_only_the_files_it_needs(repository, tmp_path):
    with serving({NAME: repository}) as server:
        done = resolve(NAME, home=tmp_path / "home", url=server.url)
        assert done.returncode == 0, done.stderr
        folder = pathlib.Path(done.stdout.strip())
        present = {file.relative_to(folder).as_posix() for file in folder.rglob("*")}
        assert present == {
            "README.md",
            "config.json",
            "merges.txt",
            "model.safetensors",
            "tokenizer_config.json",
        }
        assert "100%" in done.stderr  # a progress bar
        server.requests.clear()
        again = resolve(NAME, home=tmp_path / "home", url=server.url)
        assert again.stdout == done.stdout and again.stderr == ""
        assert server.requests == []
        (folder / "tokenizer_config.json").unlink()  # as if another tool had left it out
        resolve(NAME, home=tmp_path / "home", url=server.url)
        assert (folder / "tokenizer_config.json").is_file()
    weights = (folder / "model.safetensors").read_bytes()
    assert weights == (GOLDEN / "model.safetensors").read_bytes()
    offline = resolve(NAME, home=tmp_path / "home", url=server.url, HF_HUB_OFFLINE="1")
    assert offline.stdout == done.stdout


@pytest.mark.slow
def test_a_config_is_read_without_weights_which_follow_when_they_are_needed(repository, tmp_path):
    with serving({NAME: repository}) as server:
        done = resolve(f"{NAME}@main", home=tmp_path / "home", url=server.url, weights=False)
        folder = pathlib.Path(done.stdout.strip())
        assert (folder / "config.json").is_file()
        assert not (folder / "model.safetensors").exists()
        done = resolve(f"{NAME}@{COMMIT}", home=tmp_path / "home", url=server.url)
        assert pathlib.Path(done.stdout.strip()) == folder
        assert (folder / "model.safetensors").is_file()


@pytest.mark.slow
def test_of_a_sharded_model_the_files_of_its_index_are_downloaded(repository, tmp_path):
    (repository / "model.safetensors").rename(repository / "part-1.safetensors")
    (repository / "consolidated.safetensors").write_text("not needed")
    index = {"weight_map": {"model.norm.weight": "part-1.safetensors"}}
    (repository / hub.INDEX).write_text(json.dumps(index))
    with serving({NAME: repository}) as server:
        done = resolve(NAME, home=tmp_path / "home", url=server.url)
    files = {file.name for file in pathlib.Path(done.stdout.strip()).glob("*.safetensors")}
    assert files == {"part-1.safetensors"}


ONLINE = {
    "owner/absent": "and there is no model 'owner/absent' on http",
    "owner/gated": "owner/gated is gated: ask for access at http",
    f"{NAME}@v9": f"{NAME} on the Hub has no revision 'v9': give a branch",
    "owner/adapter": "has no model.safetensors: it is an adapter",
    "owner/files": "has no config.json; for a repository of GGUF files",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "words_of"),
    [
        ({}, ONLINE),
        ({"HF_HUB_OFFLINE": "1"}, {NAME: "and HF_HUB_OFFLINE is set: unset it"}),
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {NAME: "failed (ConnectError"}),
    ],
)
def test_what_cannot_be_downloaded_says_why_on_one_line(environ, words_of, repository, tmp_path):
    adapter, files = tmp_path / "adapter", tmp_path / "files"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    files.mkdir()
    (files / "model.gguf").write_text("")
    folders = {NAME: repository, "owner/adapter": adapter, "owner/files": files}
    folders["owner/gated"] = repository
    with serving(folders, gated=("owner/gated",)) as server:
        done = resolve(*words_of, home=tmp_path / "home", url=server.url, **environ)
    for line, words in zip(done.stdout.splitlines(), words_of.values(), strict=True):
        assert line.startswith("error: ") and words in line


@pytest.mark.parametrize("name", ["runs/a--b", "runs/a..b", "runs/a-", "runs/" + "x" * 97])
def test_a_name_that_the_hub_cannot_have_may_be_a_wrong_path(name):
    words = f"{name}' is not a folder on this machine, and the Hub can have no model of this name"
    with pytest.raises(UserError, match=f"{re.escape(words)} .*: correct the path or the name"):
        by_name.resolve_model(name)


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
