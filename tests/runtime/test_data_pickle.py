"""Data of another process are read; functions are not called."""

from __future__ import annotations

import collections
import enum
import functools
import os
import pickle
from typing import Any

import numpy as np
import pytest

from jax_ragrl.errors import EffectError, UserError
from jax_ragrl.llm.base import MeteredReply
from jax_ragrl.runtime import data_pickle
from jax_ragrl.types import Hits, Passage, Question


class Color(enum.Enum):
    RED = 1


class Call:
    """Calls a function when it is unpickled, as an attacker's message does."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


DATA = [
    ("", None),
    [1, 2.5, True, "text", b"bytes", {"a": {1, 2}}, frozenset("ab"), range(3)],
    Hits((Passage("1", "t", "x"),), (0.5,)),
    Question("q", "text", ("a",), metadata={"hops": [1]}),
    collections.Counter("aab"),
    Color.RED,
    np.float32(1.5),
    np.int64(3),
]


@pytest.mark.parametrize("value", DATA, ids=lambda value: type(value).__name__)
def test_data_are_read(value):
    assert data_pickle.loads(data_pickle.dumps(value)) == value


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "<U3", object])
def test_arrays_are_read(dtype):
    x = np.array([["a", "b"]], object) if dtype is object else np.ones((2, 3), dtype)
    for value in (x, x.T, x[:, ::2]):
        y = data_pickle.loads(data_pickle.dumps(value))
        assert y.dtype == value.dtype and (y == value).all()


def test_replies_keep_their_costs_and_errors_their_text():
    reply, error = data_pickle.loads(data_pickle.dumps((MeteredReply("x", 3, 4), EffectError("y"))))
    assert (reply, reply.prompt_tokens, reply.completion_tokens, str(error)) == ("x", 3, 4, "y")


@pytest.mark.parametrize(
    "call",
    [
        Call(os.system, "exit 1"),
        Call(eval, "1 + 1"),
        Call(exec, "pass"),
        Call(open, "/dev/null"),
        Call(getattr, "x", "upper"),
        Call(functools.partial, print),
        Call(np.load, "x"),
        Call(__import__, "os"),
    ],
    ids=lambda call: call.call[0].__name__,
)
def test_a_function_of_another_process_is_refused(call):
    with pytest.raises(UserError, match="which is not data"):
        data_pickle.loads(pickle.dumps(("", [call])))


def test_nothing_is_imported_for_a_message():
    with pytest.raises(UserError, match="antigravity"):
        data_pickle.loads(b"cantigravity\nfly\n.")
