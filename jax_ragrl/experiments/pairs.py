"""Pairs of arms: a claim about their difference, and when it is decided."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax_ragrl.config.ranges import NotNegative
from jax_ragrl.errors import UserError

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"
HIGHER, NOT_LOWER, DIFFERS = "higher", "not lower", "differs"
LEVEL = 0.05


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two arms, and a claim about the difference of the first and the second.

    Fields:
      first: the name of the first arm.
      second: the name of the second arm.
      metric: the measure of both arms, see `measures`.
      kind: `higher`: the first arm is higher; `not lower`: it is lower by less than `margin`;
        `differs`: it is higher or lower.
      margin: in the unit of the metric. A smaller difference counts as none: if the whole interval
        is between `-margin` and `margin`, the arms do not differ; if it is below `margin`, the
        first arm is not higher. 0: no difference is too small.
      among: the questions that count, `hops=1,2` or `kind=NAME`; empty: all.
      second_metric: the metric of the second arm, if it is another one.
    """

    first: str
    second: str
    metric: str = "f1"
    kind: str = HIGHER
    margin: NotNegative = 0.0
    among: str = ""
    second_metric: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (HIGHER, NOT_LOWER, DIFFERS):
            raise UserError(
                f"the kind of a pair is {self.kind!r}: use {HIGHER}, {NOT_LOWER} or {DIFFERS}"
            )
        if self.kind == NOT_LOWER and self.margin <= 0:
            raise UserError(f"a pair of the kind {NOT_LOWER!r} needs a margin above 0")

    @property
    def boundary(self) -> float:
        """The difference that separates the claim from its opposite."""
        return -self.margin if self.kind == NOT_LOWER else 0.0

    @property
    def text(self) -> str:
        """The claim in words, with the arms, the metric apart."""
        relation = {
            HIGHER: "over",
            NOT_LOWER: f"less than {self.margin:g} below",
            DIFFERS: "other than",
        }[self.kind]
        return f"{self.first} {relation} {self.second}"


def decide(pair: Pair, comparison: Mapping[str, Any]) -> str:
    """Decides a pair: both the interval and the adjusted test must exclude the boundary.

    Arms that differ in the other direction contradict a claim that has a direction; a difference
    below the margin contradicts a claim that there is one.
    """
    low, high = comparison["ci95"]
    above, below = low > pair.boundary, high < pair.boundary
    if comparison["p_adjusted"] < LEVEL and (above or below):
        return HOLDS if above or pair.kind == DIFFERS else FAILS
    # Two one-sided tests (Schuirmann 1987), stricter here: the interval has 95 %, not 90 %.
    # An interval without width says nothing about the error of the difference.
    is_small = low < high < pair.margin and (pair.kind == HIGHER or -pair.margin < low)
    return FAILS if is_small and pair.margin > 0 and pair.kind != NOT_LOWER else UNDECIDED
