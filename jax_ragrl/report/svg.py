"""Small pieces of SVG: a frame that maps numbers to pixels, axes, paths. Text is always escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup


class Frame(NamedTuple):
    """A plot of `width` by `height` pixels whose inner area shows `x0..x1` by `y0..y1`."""

    width: float
    height: float
    x0: float
    x1: float
    y0: float
    y1: float
    left: float = 44
    right: float = 12
    top: float = 10
    bottom: float = 24

    def x(self, value: float) -> float:
        """The pixel column of a value; a frame of one value puts it at the left."""
        share = (value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.0
        return round(self.left + share * (self.width - self.left - self.right), 1)

    def y(self, value: float) -> float:
        """The pixel row of a value, larger values higher up."""
        share = (value - self.y0) / (self.y1 - self.y0) if self.y1 > self.y0 else 0.5
        return round(self.height - self.bottom - share * (self.height - self.top - self.bottom), 1)


def svg(width: float, height: float, label: str, *parts: Markup) -> Markup:
    """A picture that fills the width it is given; `label` is read to those who cannot see it.

    The style sheet finds its own width in the variable `--width`.
    """
    return element(
        "svg",
        joined(parts),
        viewBox=f"0 0 {width:g} {height:g}",
        style=f"--width:{width:g}px",
        role="img",
        aria_label=label,
    )


def element(name: str, content: str | Markup = "", **attributes: Any) -> Markup:
    """`<name ...>content</name>`; underscores in attribute names become hyphens."""
    inside = joined(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), number(value))
        for key, value in attributes.items()
    )
    tag = Markup(name)
    return (
        Markup("<")
        + tag
        + inside
        + Markup(">")
        + Markup("{}").format(content)
        + Markup("</{}>").format(tag)
    )


def text(x: float, y: float, content: str, anchor: str = "start", class_: str = "tick") -> Markup:
    """One line of text."""
    return element("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def path(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """A polyline through pixel points."""
    return element("path", d=_steps(points), class_=class_)


def area(
    upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], class_: str
) -> Markup:
    """The region between two polylines."""
    return element("path", d=_steps([*upper, *reversed(lower)]) + "Z", class_=class_)


def axes(frame: Frame, y_ticks: Sequence[float], form: str) -> Markup:
    """Horizontal rules with their values, and the steps below."""
    right = frame.width - frame.right
    rules = [
        element("line", x1=frame.left, x2=right, y1=frame.y(v), y2=frame.y(v), class_="rule")
        + text(frame.left - 7, frame.y(v) + 4, form.format(v), "end")
        for v in y_ticks
    ]
    base = frame.height - frame.bottom + 16
    xs = ticks(frame.x0, frame.x1, 6)
    steps = [
        text(frame.x(v), base, f"{v:g}", "middle") for v in xs if v < frame.x1 * 0.93 or v == 0
    ]
    return joined([*rules, *steps, text(right, base, f"step {frame.x1:g}", "end")])


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
    return [round(i * unit, 12) for i in range(first, last + 1)]


def number(value: Any) -> Any:
    """Floats without a tail of digits; anything else as it is."""
    return f"{value:.6g}" if isinstance(value, float) else value


def joined(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def _steps(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points) if points else ""
