"""Compiled programs are cached in the folder of the run, or in the folder of the user."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jax_ragrl.bench.sample import PLAIN_TOKENIZER
from jax_ragrl.cli import main as cli
from jax_ragrl.runtime import compile_cache
from jax_ragrl.runtime.compile_cache import (
    compile_seconds,
    enable_compile_cache,
    report_compiling,
)
from jax_ragrl.sampling.sampler import SamplingJob, Shapes, sample_jobs
from tests.tiny import split_policy


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with a GPU and without a cache of the user; settings are undone afterwards."""
    before = cache_folder()
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    yield monkeypatch
    jax.config.update("jax_compilation_cache_dir", before)


def cache_folder() -> str | None:
    """The folder of JAX's compilation cache."""
    return jax.config.jax_compilation_cache_dir


def test_programs_are_cached_in_the_run(gpu_machine, tmp_path: pathlib.Path):
    enable_compile_cache(tmp_path / "run")
    assert cache_folder() == str(tmp_path / "run" / "compiled")
    assert not (tmp_path / "run").exists()  # until there is one


def test_a_cache_of_the_user_takes_precedence(gpu_machine, tmp_path: pathlib.Path):
    gpu_machine.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))  # as JAX has read it
    enable_compile_cache(tmp_path / "run")
    assert cache_folder() is None


def test_a_cpu_caches_programs_only_on_request(gpu_machine, tmp_path: pathlib.Path):
    gpu_machine.setattr(jax, "default_backend", lambda: "cpu")
    enable_compile_cache(tmp_path / "run")
    assert cache_folder() is None
    enable_compile_cache(tmp_path / "run", also_cpu=True)
    assert cache_folder() == str(tmp_path / "run" / "compiled")


class ReachedError(Exception):
    """Raised in place of the work of a command."""


@pytest.mark.parametrize("command", ["train", "quickstart"])
def test_a_run_enables_its_cache_before_compiling(
    command: str, gpu_machine, tmp_path: pathlib.Path
):
    def work(*_: object) -> None:
        assert cache_folder() == str(tmp_path / "run" / "compiled")
        raise ReachedError

    gpu_machine.setattr("jax_ragrl.run.components.build_components", work)
    gpu_machine.setattr("jax_ragrl.experiments.experiment.quickstart", work)
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


def test_samplers_and_updates_name_their_shapes(monkeypatch):
    monkeypatch.setattr(compile_cache, "MIN_REPORTED_S", 0.0)
    lines: list[str] = []
    monkeypatch.setattr(compile_cache.tqdm.tqdm, "write", lambda line, **_: lines.append(line))
    shapes = Shapes(prompt_lengths=(16,), batch_sizes=(4,), max_new_tokens=40)
    jobs = [SamplingJob((5, 6), seed, 1.0, 1.0, 20) for seed in range(2)]
    sample_jobs(split_policy(), PLAIN_TOKENIZER, jobs, 3, shapes)
    shapes = dataclasses.replace(shapes, initial_cache_size=16)
    sample_jobs(split_policy(), PLAIN_TOKENIZER, jobs[:1], 1, shapes)
    names = [line.rpartition(": ")[0] for line in lines]
    assert names == [
        "compiled sampler 4 x 16 + 32, width 3",
        "compiled sampler 4 x 16 + 16, width 1",
        "compiled sampler 4 x 16 + 32, width 1, continued",
    ]
