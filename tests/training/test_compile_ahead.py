"""Programs are compiled before the first step if the config asks for it, or if each has a core."""

from __future__ import annotations

import types

import pytest

from jax_ragrl.training import compile_ahead as module
from jax_ragrl.training import loop


def job(*, is_asked: bool) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        run=types.SimpleNamespace(compile_ahead=is_asked, steps=2, staleness=0)
    )


@pytest.mark.parametrize(
    ("cores", "is_asked", "compiled"), [(3, False, 3), (2, False, 0), (2, True, 3)]
)
def test_unasked_programs_are_compiled_if_each_has_a_core(cores, is_asked, compiled, monkeypatch):
    monkeypatch.setattr(module, "programs_of_run", lambda *_: ["a", "b", "c"])
    monkeypatch.setattr(module, "count_cores", lambda: cores)
    monkeypatch.setattr(module, "compile_programs", lambda programs, _: len(programs))
    assert module.compile_ahead(job(is_asked=is_asked), {}, {}, None) == compiled


@pytest.mark.parametrize(
    ("devices", "is_asked", "start", "is_called"),
    [
        ([], False, 0, False),
        ([], True, 0, True),
        (["gpu"], False, 0, True),
        (["gpu"], True, 2, False),
    ],
)
def test_accelerators_need_no_option(devices, is_asked, start, is_called, monkeypatch):
    calls = []
    monkeypatch.setattr(loop, "accelerators", lambda: devices)
    monkeypatch.setattr(loop, "acting_models", lambda *_, **__: {})
    monkeypatch.setattr(loop, "compile_ahead", lambda *_: calls.append(1))
    parts = types.SimpleNamespace(tokenizer=None)
    loop.compile_programs(job(is_asked=is_asked), parts, {}, start)
    assert bool(calls) == is_called
