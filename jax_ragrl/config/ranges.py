"""The values that a numeric key of a config may have, as annotations of its field.

`schema.convert` reads them, and bounds of `annotated_types` in any other annotation, such as
`Annotated[float, Gt(1)]`. A number without bounds must be finite.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, GroupedMetadata, Gt, Le, Lt

from jax_ragrl.errors import UserError

BOUNDS = {
    Ge: (operator.ge, "at least"),
    Gt: (operator.gt, "above"),
    Le: (operator.le, "at most"),
    Lt: (operator.lt, "below"),
}


class Or(NamedTuple):
    """A further value with a meaning of its own, such as -1 for the rest of a mesh."""

    value: float


ASCENDING = "ascending"  # of a tuple: each number once, in order

Count = Annotated[int, Ge(1)]
Natural = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Le(2**32 - 1)]  # Grain takes no other ones
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
NotPositive = Annotated[float, Le(0)]
Share = Annotated[float, Ge(0), Le(1)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Probability = Annotated[float, Gt(0), Le(1)]
Lengths = Annotated[tuple[Count, ...], ASCENDING]
Bound = Annotated[float, Or(-math.inf), Or(math.inf)]  # both ends may be open
MeshSizes = tuple[Annotated[int, Ge(1), Or(-1)], ...]


def check_number(value: float, limits: Sequence[Any], where: str) -> None:
    """Raises `UserError` if a number at the path `where` is neither within bounds nor an `Or`."""
    # An `Interval` is several bounds.
    limits = [x for each in limits for x in (each if isinstance(each, GroupedMetadata) else [each])]
    others = [limit.value for limit in limits if isinstance(limit, Or)]
    bounds = [
        (*BOUNDS[type(limit)], getattr(limit, type(limit).__name__.lower()))
        for limit in limits
        if type(limit) in BOUNDS
    ]
    # NaN is within no range, and infinity would be in each without an end.
    fits = math.isfinite(value) and all(compare(value, end) for compare, _, end in bounds)
    if not fits and value not in others:
        words = [f"{name} {end:.10g}" for _, name, end in bounds] + [f"or {x:g}" for x in others]
        raise UserError(f"{where} is {value}: use {', '.join(['a finite number', *words])}")
