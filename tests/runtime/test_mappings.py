"""Compiled programs are dropped before the process runs out of memory mappings."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from jax_ragrl.runtime import compile_cache
from jax_ragrl.runtime.mappings import free_programs_at_limit


def files(folder: pathlib.Path, count: int, limit: str = "100\n") -> tuple[pathlib.Path, ...]:
    (folder / "maps").write_text("one line per mapping\n" * count)
    (folder / "limit").write_text(limit)
    return folder / "maps", folder / "limit"


def test_programs_are_dropped_near_the_limit_and_compiled_again(tmp_path, capsys):
    double = jax.jit(lambda x: 2 * x)
    x = jnp.ones(3)
    double(x)
    assert not free_programs_at_limit(*files(tmp_path, 74)) and double._cache_size() == 1
    assert free_programs_at_limit(*files(tmp_path, 75)) and double._cache_size() == 0
    assert "75 of 100 memory mappings" in capsys.readouterr().err
    assert float(double(x)[0]) == 2.0 and double._cache_size() == 1


@pytest.mark.parametrize("limit", ["", "none"])
def test_systems_without_a_limit_keep_their_programs(tmp_path, limit):
    maps, unreadable = files(tmp_path, 75, limit)
    assert not free_programs_at_limit(maps, unreadable)
    assert not free_programs_at_limit(tmp_path / "missing", unreadable)


def test_the_mappings_are_counted_after_each_compilation(monkeypatch):
    counts = []
    monkeypatch.setattr(compile_cache, "free_programs_at_limit", lambda: counts.append(1))
    triple, x = jax.jit(lambda x: 3 * x), jnp.ones(4)
    for _ in range(2):
        with compile_cache.report_compiling("triple"):
            triple(x)
    assert len(counts) == 1
