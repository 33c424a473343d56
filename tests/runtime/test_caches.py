"""Drafts of folders: those of killed processes are removed, those of living ones are not."""

import pathlib
import signal
import subprocess
import sys

import pytest

from jax_ragrl.runtime.caches import cache_folder, draft_folder, remove_drafts

REPO = pathlib.Path(__file__).parents[2]
WRITER = """
import pathlib, sys
from jax_ragrl.runtime.caches import draft_folder
with draft_folder(pathlib.Path(sys.argv[1]), "unfinished-") as draft:
    (draft / "rows").write_text("begun")
    print("writes", flush=True)
    sys.stdin.read()
"""


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_draft_is_removed_at_the_end_unless_it_was_renamed(tmp_path: pathlib.Path):
    with pytest.raises(ValueError, match="oops"), draft_folder(tmp_path, "unfinished-") as draft:
        (draft / "rows").touch()
        raise ValueError("oops")
    assert names(tmp_path) == []
    with draft_folder(tmp_path, "unfinished-") as draft:
        draft.rename(tmp_path / "done")
    assert names(tmp_path) == ["done"]


def test_only_drafts_of_killed_processes_are_removed(tmp_path: pathlib.Path):
    program = [sys.executable, "-c", WRITER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPO}
    with subprocess.Popen(program, **pipes) as first, subprocess.Popen(program, **pipes) as second:
        assert [p.stdout.readline() for p in (first, second)] == ["writes\n"] * 2
        remove_drafts(tmp_path, "unfinished-")
        assert len(names(tmp_path)) == 2
        first.send_signal(signal.SIGKILL)
        first.wait()
        remove_drafts(tmp_path, "unfinished-")
        assert len(names(tmp_path)) == 1
        second.kill()
        second.wait()
    with draft_folder(tmp_path, "unfinished-") as draft:
        assert names(tmp_path) == [draft.name]
    assert names(tmp_path) == []


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAGRL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ann")
    assert cache_folder() == pathlib.Path("/home/ann/.cache/jax_ragrl")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_folder() == pathlib.Path("/caches/jax_ragrl")
    monkeypatch.setenv("RAGRL_CACHE", "/mine")
    assert cache_folder() == pathlib.Path("/mine")
