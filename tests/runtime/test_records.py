"""Data of another process or of a checkpoint are read; they name no code, and nothing is called."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import json
import os
import pickle
import sys
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_ragrl.errors import UserError
from jax_ragrl.rollout.effects import Done, Search
from jax_ragrl.rollout.roles import ParsedAction
from jax_ragrl.runtime import records
from jax_ragrl.types import Hits, Passage, Question
from tests.rollout.tape import PAPER, Tape, improvise, play

if TYPE_CHECKING:
    from collections.abc import Hashable


class Color(enum.Enum):
    RED = 1


class Score(NamedTuple):
    value: float


@dataclasses.dataclass(frozen=True)
class Node:
    text: str
    children: tuple[Node, ...] = ()


@records.declare
@dataclasses.dataclass(frozen=True)
class Own:
    """A note of a user's system, with everything that it may hold."""

    question: Question
    queries: tuple[str, ...] = ()
    color: Color | None = None
    tree: Node | None = None
    scores: dict[str, Score] = dataclasses.field(default_factory=dict)
    replies: tuple[Any, ...] = ()
    key: Hashable = None  # a name for type checkers alone
    length: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", len(self.queries))


class Unknown(NamedTuple):
    value: int


QUESTION = Question("q", "text", ("a",), metadata={"hops": [1], "day": datetime.date(2026, 1, 2)})
PASSAGE = Passage("1", "t", "half a pair \ud800")
OWN = Own(
    *(QUESTION, ("b", "c"), Color.RED, Node("a", (Node("b"),)), {"x": Score(0.1)}),
    replies=(ParsedAction("Go", (1, "x")), Hits((PASSAGE,), (0.5,)), Search("q", 2), Done(None)),
    key=(1, "x"),
)
DATA = [
    ("", None),
    [1, 2.5, True, "text", b"bytes", {"a": {1}}, frozenset("a"), 2**70, ()],
    (1, 2.0, -0.0, float("inf"), 1e-320),
    [0.0, -0.0, 0, False, 1, True, 1.0],
    Hits((PASSAGE, PASSAGE), (0.5, 0.25)),
    QUESTION,
    OWN,
    collections.Counter("aab"),
    collections.OrderedDict(b=1, a=2),
    [datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC), decimal.Decimal("1.50")],
    np.float32(1.5),
    np.int64(3),
]


def again(value: Any) -> Any:
    return records.loads(records.dumps(value))


@pytest.mark.parametrize("value", DATA, ids=lambda value: type(value).__name__)
def test_data_are_read_as_they_were(value):
    assert again(value) == value and repr(again(value)) == repr(value)


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "<U3", "complex64"])
def test_arrays_are_read(dtype):
    for x in (np.ones((2, 3), dtype), np.ones((2, 3), dtype).T, np.zeros((0, 2), dtype)):
        y = again(x)
        assert y.dtype == x.dtype and y.shape == x.shape and (y == x).all()
        assert y.flags.writeable


def test_a_value_that_occurs_often_is_written_once():
    passage = Passage("1", "t", np.random.default_rng(0).bytes(10_000).hex())
    many = again([passage] * 100)
    assert len(records.dumps([passage] * 100)) < 1.1 * len(records.dumps([passage]))
    assert all(one is many[0] for one in many)


class Call:
    """Calls a function when it is unpickled, as an attacker's message does."""

    def __reduce__(self) -> Any:
        return exec, ("import sys; sys.was_attacked = True",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_pickle_is_read(protocol: int):
    data = pickle.dumps(("", [Call()]), protocol)
    for message in (data, zlib.compress(data), zlib.compress(json.dumps([data.hex()]).encode())):
        try:
            assert records.loads(message) == data.hex()  # a text, of which nothing was called
        except UserError as error:
            assert "cannot be read" in str(error)
    assert not hasattr(sys, "was_attacked")


@pytest.mark.parametrize(
    "name",
    [
        # The dataclass of another package by which the restricted pickle could be left.
        "etils.epy.lazy_imports_utils.LazyModule",
        "tests.runtime.test_records.Unknown",
        "os.system",
        "builtins.eval",
        "antigravity.fly",
        "jax_ragrl.rollout.collect.Environment",
        "__class__",
    ],
)
def test_only_declared_classes_are_read_and_nothing_is_imported(name: str):
    import etils.epy.lazy_imports_utils as lazy

    before = set(sys.modules)
    assert dataclasses.is_dataclass(lazy.LazyModule)
    with pytest.raises(UserError, match="does not declare"):
        records.loads(entries("os", "system", [name, *range(2)]))
    assert set(sys.modules) == before and records.known_classes().get(name) is None


def entries(*values: Any) -> bytes:
    return zlib.compress(json.dumps(values).encode())


PASSAGE_NAME = "jax_ragrl.types.Passage"


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("a", [PASSAGE_NAME, 0, 0]),
        ("a", [PASSAGE_NAME, 0, 0, 0, 0]),
        ("a", [PASSAGE_NAME, 0, 0, 9]),
        ("a", [PASSAGE_NAME, 0, 0, -1]),
        ("a", [PASSAGE_NAME, 0, 0, True]),
        ("a", [PASSAGE_NAME, 0, 0, "__class__"]),
        (["numbers", ["a"]],),
        (["numbers", [True]],),
        (["array", "|O", [1], "AAAAAAAAAAA="],),
        (["array", "<f4", [9], "AAAAAA=="],),
        (["array", "<f4", [0], "AAAAAA=="],),
        (["tests.runtime.test_records.Color", 0],),
        ("__class__", ["tests.runtime.test_records.Color", 0]),
        ({"a": 1},),
        ([],),
        ([["tuple"]],),
        (["tuple", 0],),
        ("a", ["tuple", 0], ["tuple", 1, 1], ["set", 2]),
        (json.loads("[" * 500 + "]" * 500),),
    ],
    ids=str,
)
def test_a_malformed_message_is_one_clear_error(values):
    with pytest.raises(UserError, match=r"cannot be read|does not declare"):
        records.loads(entries(*values))


def test_a_field_of_another_type_and_a_value_that_contains_itself_are_refused():
    with pytest.raises(UserError, match=r"'text' of jax_ragrl.types.Passage holds a int"):
        records.loads(entries("a", 1, [PASSAGE_NAME, 0, 0, 1]))
    with pytest.raises(UserError, match="'queries' of .*Own holds a list.* annotate"):
        again(dataclasses.replace(OWN, queries=["b"]))
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UserError, match="contains itself"):
        records.dumps(value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_one_clear_error(data: bytes, is_compressed: bool):
    with pytest.raises(UserError, match="cannot be read"):
        records.loads(zlib.compress(data) if is_compressed else data)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_forests_are_read_or_one_clear_error(data: st.DataObject):
    message = bytearray(zlib.decompress(FOREST))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    try:
        records.loads(zlib.compress(message))
    except UserError as error:
        assert "\n" not in str(error)


FOREST = records.dumps(play(Tape(improvise), expander=PAPER))


@pytest.mark.parametrize(
    "value", [Unknown(1), os.system, object(), Unknown, np.array([{}]), {1: ({}, [Unknown(2)])}]
)
def test_what_is_no_data_is_refused_when_it_is_written(value):
    with pytest.raises(UserError, match="resumed runs cannot read: use built-in types"):
        records.dumps(value)


def test_of_two_classes_of_one_name_the_newer_one_is_read():
    """As in a notebook, a cell of which is run again."""

    def cell() -> Any:
        @records.declare
        @dataclasses.dataclass(frozen=True)
        class Cell:
            number: int = 1

        return Cell

    _, newer = cell(), cell()
    assert type(again(newer(2))) is newer
