"""A number of a config is within the range that its field declares."""

import dataclasses
import math
import pkgutil
import typing
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

import pytest
from annotated_types import Gt, Interval, Lt

from jax_ragrl.config.ranges import Bound, Count, Lengths, MeshSizes, NotNegative, Share
from jax_ragrl.config.schema import build, convert, fields_of, is_section
from jax_ragrl.errors import UserError
from jax_ragrl.run.config import Job
from jax_ragrl.systems import baselines
from jax_ragrl.systems.registry import PAPERS, system_module
from jax_ragrl.warmstart.demos import WarmStart
from jax_ragrl.warmstart.finetune import Finetune
from jax_ragrl.warmstart.warmup import Warmup

BASELINES = [m.name for m in pkgutil.iter_modules(baselines.__path__, f"{baselines.__name__}.")]
SETTINGS = [
    module.Settings
    for module in map(system_module, [*PAPERS, *BASELINES])
    if hasattr(module, "Settings")
]


def types_in(hint: Any, cls: type = object) -> Iterator[tuple[Any, type]]:
    """The types in a type, sections first to last, each with the class of its field."""
    yield hint, cls
    if is_section(hint):
        for field in fields_of(hint).values():
            yield from types_in(field.hint, hint)
    elif typing.get_origin(hint) not in (Annotated, typing.Literal):
        for inner in typing.get_args(hint):
            yield from types_in(inner, cls)


def test_every_number_of_a_section_has_a_range():
    """Otherwise a new key would only be checked for being finite."""
    found = [
        pair for cls in (Job, WarmStart, Finetune, Warmup, *SETTINGS) for pair in types_in(cls)
    ]
    assert len({hint for hint, _ in found if is_section(hint)}) > 45
    # A recipe is built by its system, with the branches of its expander.
    assert {cls.__name__ for hint, cls in found if hint in (int, float)} == {
        "Branching",
        "Growth",
        "Recipe",
    }


@pytest.mark.parametrize(
    ("hint", "inside", "outside", "words"),
    [
        (float, (-1e9, 0), (math.inf, -math.inf, math.nan), "a finite number"),
        (Count, (1, 2), (0, -1), "a finite number, at least 1"),
        (Share, (0, 1), (-0.1, 1.1, math.nan), "a finite number, at least 0, at most 1"),
        (NotNegative, (0.0, 3), (-1, math.inf), "a finite number, at least 0"),
        (Annotated[float, Gt(0), Lt(1)], (0.5,), (0, 1), "a finite number, above 0, below 1"),
        (Annotated[int, Interval(ge=1, lt=3)], (1, 2), (0, 3), "a finite number, .*1, below 3"),
        (Bound, (-math.inf, 3, math.inf), (math.nan,), "a finite number, or -inf, or inf"),
        (Count | None, (None, 1), (0,), "a finite number, at least 1"),
    ],
)
def test_a_range_is_its_bounds(hint, inside, outside, words):
    assert [convert(hint, value, "config.x") for value in inside] == list(inside)
    for value in outside:
        with pytest.raises(UserError, match=rf"^config\.x is \S+: use {words}$"):
            convert(hint, value, "config.x")


def test_an_entry_of_a_list_is_named():
    assert convert(MeshSizes, [-1, 2], "mesh") == (-1, 2)
    with pytest.raises(UserError, match=r"mesh\[1\] is 0: use a finite number, at least 1, or -1"):
        convert(MeshSizes, (1, 0), "mesh")
    for value in ((2, 1), (1, 1)):
        with pytest.raises(UserError, match=r"rows is .*: list the numbers in ascending order"):
            convert(Lengths, value, "rows")


class Weights(NamedTuple):
    alpha: float = 0  # a field of another class has this name, and must be positive
    steps: int = -1


@dataclasses.dataclass(frozen=True)
class Settings:
    weights: Weights = Weights()
    alpha: float = 0


def test_a_field_of_another_class_limits_no_number():
    values = {"alpha": 0, "weights": {"alpha": -2, "steps": -5}}
    assert build(Settings, values) == Settings(Weights(-2.0, -5), 0.0)
    with pytest.raises(UserError, match=r"config\.weights\.alpha is nan: use a finite number"):
        build(Settings, {"weights": {"alpha": math.nan}})
