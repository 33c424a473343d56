"""What is compiled is kept in the folder of the run, or where the user wants it."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from jax_ragrl.cli import main as cli
from jax_ragrl.runtime.compile_cache import compile_seconds, keep_programs


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with a GPU and no choice of the user's; whatever is set is forgotten."""
    before = kept()
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    yield monkeypatch
    jax.config.update("jax_compilation_cache_dir", before)


def kept() -> str | None:
    """Where JAX keeps its programs."""
    return jax.config.jax_compilation_cache_dir


def test_programs_are_kept_with_the_run(chosen, tmp_path: pathlib.Path):
    keep_programs(tmp_path / "run")
    assert kept() == str(tmp_path / "run" / "compiled")
    assert not (tmp_path / "run").exists()  # until there is one


def test_where_the_user_keeps_them_they_stay(chosen, tmp_path: pathlib.Path):
    chosen.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "mine"))  # as JAX has read it
    keep_programs(tmp_path / "run")
    assert kept() is None


def test_a_cpu_keeps_them_where_that_is_asked_for(chosen, tmp_path: pathlib.Path):
    chosen.setattr(jax, "default_backend", lambda: "cpu")
    keep_programs(tmp_path / "run")
    assert kept() is None
    keep_programs(tmp_path / "run", also_cpu=True)
    assert kept() == str(tmp_path / "run" / "compiled")


class ReachedError(Exception):
    """Raised where a command would begin its work."""


@pytest.mark.parametrize("command", ["train", "quickstart"])
def test_a_run_keeps_its_programs_before_it_compiles_any(
    command: str, chosen, tmp_path: pathlib.Path
):
    def work(*_: object) -> None:
        assert kept() == str(tmp_path / "run" / "compiled")
        raise ReachedError

    chosen.setattr("jax_ragrl.run.components.assemble", work)
    chosen.setattr("jax_ragrl.experiments.experiment.quickstart", work)
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
