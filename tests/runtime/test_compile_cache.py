"""Compiled programs are cached in the folder of the user or of a run; drafts of folders."""

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import jax
import jaxlib
import numpy as np
import pytest

from jax_ragrl.bench.sample import PLAIN_TOKENIZER
from jax_ragrl.cli import main as cli
from jax_ragrl.runtime import caches, compile_cache
from jax_ragrl.runtime.caches import draft_folder, remove_drafts
from jax_ragrl.runtime.compile_cache import compile_seconds, enable_compile_cache, report_compiling
from jax_ragrl.runtime.jsonl import write_rows
from jax_ragrl.sampling.sampler import SamplingJob, Shapes, sample_jobs
from tests.tiny import split_policy, tokenizer


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """The cache folder of a user without a cache of programs; settings are undone afterwards."""
    before = cache_folder()
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("RAGRL_CACHE", str(tmp_path / "user"))
    # A test of its own compiles programs for it.
    monkeypatch.setattr(compile_cache, "_loads_own_programs", lambda _: True)
    yield tmp_path / "user" / "compiled"
    jax.config.update("jax_compilation_cache_dir", before)


def cache_folder() -> str | None:
    """The folder of JAX's compilation cache."""
    return jax.config.jax_compilation_cache_dir


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_programs_of_every_device_are_cached_for_the_user_alone(machine, monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    enable_compile_cache()
    (folder,) = machine.iterdir()
    assert cache_folder() == str(folder) and folder.stat().st_mode & 0o077 == 0
    assert folder.name.startswith(f"jaxlib-{jaxlib.__version__}-")


def test_another_processor_or_compiler_has_another_folder(machine, monkeypatch):
    names = [compile_cache._machine()]
    monkeypatch.setattr(jaxlib, "__version__", "0.0.1")
    names.append(compile_cache._machine())
    monkeypatch.setattr(pathlib.Path, "read_text", lambda *_: "flags : avx512_new")
    names.append(compile_cache._machine())
    assert len(set(names)) == 3


@pytest.mark.parametrize("value", ["mine", ""])
def test_a_choice_of_the_user_takes_precedence(machine, monkeypatch, value):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", value)  # as JAX has read it; empty: none
    enable_compile_cache()
    assert cache_folder() is None and not machine.exists()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_compilation_cache_dir", "of the program")
    enable_compile_cache()
    assert cache_folder() == "of the program"


def test_several_processes_share_the_folder_of_their_run(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    enable_compile_cache()
    assert cache_folder() is None  # the homes of hosts may differ
    enable_compile_cache(tmp_path / "run")
    assert cache_folder() == str(tmp_path / "run" / "compiled")


def test_without_a_home_that_can_be_written_nothing_is_cached(machine, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RAGRL_CACHE", str(tmp_path / "file" / "below"))
    enable_compile_cache()
    monkeypatch.delenv("RAGRL_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    no_home = RuntimeError("Could not determine home directory.")
    monkeypatch.setattr(pathlib.Path, "expanduser", Mock(side_effect=no_home))
    enable_compile_cache()
    assert cache_folder() is None


def test_the_cache_is_bounded_and_keeps_what_was_used_last(machine, monkeypatch):
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 25)
    for n in range(4):  # of this and of other machines
        file = machine / f"machine{n % 2}" / f"program{n}-cache"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"x" * 10)
        os.utime(file, (100 - n, 50))
    enable_compile_cache()
    assert sorted(x.name for x in machine.glob("*/*")) == ["program0-cache", "program1-cache"]


def test_a_processor_that_refuses_its_own_programs_has_no_cache(machine, monkeypatch):
    monkeypatch.setattr(compile_cache, "_loads_own_programs", lambda _: False)
    enable_compile_cache()
    monkeypatch.setattr(compile_cache, "_loads_own_programs", lambda _: pytest.fail("again"))
    enable_compile_cache()
    assert cache_folder() is None


CACHED = """
import os, pathlib, sys
from jax_ragrl.runtime import caches, compile_cache
if sys.argv[1:] == ["refused"]:
    from jax._src import compilation_cache
    def refuse(*_): raise RuntimeError("Target machine feature +prefer-no-gather")
    compilation_cache.get_executable_and_time = refuse
compile_cache.enable_compile_cache()
import jax
print(jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.parametrize("argument", ["", "refused"])
def test_a_new_cache_is_tried_with_a_program(tmp_path, argument):
    environ = {x: y for x, y in os.environ.items() if x != "JAX_COMPILATION_CACHE_DIR"}
    program = [sys.executable, "-W", "ignore", "-c", CACHED, *filter(None, [argument])]
    run = subprocess.run(
        program,
        env=environ | {"RAGRL_CACHE": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    names = [path.name for path in (tmp_path / "compiled").glob("*/*")]
    assert ("refused" in names) == bool(argument) == (run.stdout == "None\n"), run.stderr


class ReachedError(Exception):
    """Raised in place of the work of a command."""


@pytest.mark.parametrize("command", ["train", "quickstart"])
def test_a_run_enables_its_cache_before_compiling(command, machine, monkeypatch, tmp_path):
    def work(*_: object) -> None:
        assert cache_folder() == str(next(machine.iterdir()))
        raise ReachedError

    monkeypatch.setattr("jax_ragrl.run.build.build_components", work)
    monkeypatch.setattr("jax_ragrl.experiments.experiment.quickstart", work)
    config = [f"--config={cli.CONFIGS / 'tiny' / 'c3po.py'}"] if command == "train" else []
    with pytest.raises(ReachedError):
        cli.main([command, *config, f"--workdir={tmp_path / 'run'}"])


def test_compiling_takes_time_once():
    program = jax.jit(lambda x: x * 3.25 + 1)
    x = jax.device_put(np.ones((3, 5), np.float32))
    before = compile_seconds()
    jax.block_until_ready(program(x))
    after = compile_seconds()
    jax.block_until_ready(program(x))
    assert after > before and compile_seconds() == after


def test_a_program_that_compiles_for_a_second_gets_one_line(capsys, monkeypatch):
    program = jax.jit(lambda x: x * 4.25 + 1)
    x = jax.device_put(np.ones((3, 7), np.float32))
    seconds = iter([10.0, 22.34, 22.34, 22.34, 22.34, 23.3])
    monkeypatch.setattr(compile_cache, "compile_seconds", lambda: next(seconds))
    for _ in range(3):  # compiles, is compiled already, takes less than a second
        with report_compiling("update 3 x 7"):
            program(x)
    out, err = capsys.readouterr()
    assert err == "compiled update 3 x 7: 12.3 s\n" and not out


@pytest.mark.slow
def test_samplers_and_updates_name_their_shapes(monkeypatch):
    monkeypatch.setattr(compile_cache, "MIN_REPORTED_S", 0.0)
    lines: list[str] = []
    monkeypatch.setattr(compile_cache.tqdm.tqdm, "write", lambda line, **_: lines.append(line))
    shapes = Shapes(prompt_lengths=(16,), batch_sizes=(4,), max_new_tokens=40)
    jobs = [SamplingJob((5, 6), seed, 1.0, 1.0, 20) for seed in range(2)]
    sample_jobs(split_policy(), PLAIN_TOKENIZER, jobs, 3, shapes)
    monkeypatch.setattr("jax_ragrl.sampling.jobs.FIRST_CACHE", 16)
    sample_jobs(split_policy(), PLAIN_TOKENIZER, jobs[:1], 1, shapes)
    # What else makes another program of one shape is named too.
    kinds = [{"top_p": 0.5}, {"allowed_token_regex": "[a-z]+"}, {"stop_strings": ("a",)}]
    for kind in kinds:
        job = SamplingJob((5, 6), 0, 1.0, **{"top_p": 1.0, "limit": 16} | kind)
        sample_jobs(split_policy(), tokenizer(), [job], 1, shapes)
    names = [line.rpartition(": ")[0] for line in lines]
    assert names[:5] == [
        "compiled prefill 4 x 16, width 3 + 32",
        "compiled sampler 4 x 16 + 32, width 3",
        "compiled prefill 4 x 16, width 1 + 16",
        "compiled sampler 4 x 16 + 16, width 1",
        "compiled sampler 4 x 16 + 32, width 1",
    ]
    endings = ["top-p", "token mask", "32 stop states"]
    assert names[6::2] == [f"compiled sampler 4 x 16 + 16, width 1, {ending}" for ending in endings]


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


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: pathlib.Path):
    file, link, pipe = (tmp_path / name for name in ("rows.jsonl", "link", "pipe"))
    file.write_text("former")
    link.symlink_to(file)
    (tmp_path / "rows.tmp").write_text("the user's own")
    before = names(tmp_path)
    with pytest.raises(TypeError):
        write_rows(link, iter([{"a": 1}, object()]))
    assert file.read_text() == "former" and names(tmp_path) == before
    write_rows(link, [{"a": 1}])
    assert file.read_text() == '{"a": 1}\n' and link.is_symlink() and names(tmp_path) == before
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_rows(pipe, [{"a": 1}])
    assert os.read(reader, 99) == b'{"a": 1}\n' and pipe.is_fifo()
    os.close(reader)


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAGRL_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ann")
    assert caches.cache_folder() == pathlib.Path("/home/ann/.cache/jax_ragrl")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert caches.cache_folder() == pathlib.Path("/caches/jax_ragrl")
    monkeypatch.setenv("RAGRL_CACHE", "/mine")
    assert caches.cache_folder() == pathlib.Path("/mine")
