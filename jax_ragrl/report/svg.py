"""SVG elements: axes, paths, text, and a frame that maps numbers to pixels. Text is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

LETTER = 6.5  # pixels, a letter of a tick on average


class Frame(NamedTuple):
    """A plot of `width` x `height` pixels whose inner area shows `x0..x1` x `y0..y1`."""

    width: float
    height: float
    x0: float
    x1: float
    y0: float
    y1: float
    margin_left: float = 44
    margin_right: float = 12
    margin_top: float = 10
    margin_bottom: float = 24

    def x(self, value: float) -> float:
        """The pixel column of a value; the left edge if the frame has a single value."""
        share = (value - self.x0) / (self.x1 - self.x0) if self.x1 > self.x0 else 0.0
        room = self.width - self.margin_left - self.margin_right
        return round(self.margin_left + share * room, 1)

    def y(self, value: float) -> float:
        """The pixel row of a value; larger values are higher up."""
        share = (value - self.y0) / (self.y1 - self.y0) if self.y1 > self.y0 else 0.5
        room = self.height - self.margin_top - self.margin_bottom
        return round(self.height - self.margin_bottom - share * room, 1)


def svg(width: float, height: float, label: str, *parts: Markup, class_: str = "") -> Markup:
    """A picture that fills the available width; its size is in pixels, `label` describes it.

    The style sheet reads the intrinsic width from the variable `--width`.
    """
    attributes = {"class_": class_} if class_ else {}
    attributes |= {"viewBox": f"0 0 {width:g} {height:g}", "style": f"--width:{width:g}px"}
    return element("svg", join(parts), **attributes, role="img", aria_label=label)


def element(name: str, content: str | Markup = "", **attributes: Any) -> Markup:
    """An element `<name ...>content</name>`, of which text is escaped.

    Underscores in the names of attributes become hyphens; a trailing one is dropped (`class_`).
    """
    inside = join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), number(value))
        for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), inside, content)


def text(x: float, y: float, content: str, anchor: str = "start", class_: str = "tick") -> Markup:
    """One line of text, of which `x` is the `start`, `middle` or `end`; `y` is its baseline."""
    return element("text", content, x=x, y=y, text_anchor=anchor, class_=class_)


def path(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    """A polyline through pixel points."""
    return element("path", d=_commands(points), class_=class_)


def area(
    upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], class_: str
) -> Markup:
    """The region between two polylines of pixel points in the same direction."""
    return element("path", d=_commands([*upper, *reversed(lower)]) + "Z", class_=class_)


def axes(frame: Frame, y_ticks: Sequence[float], form: str) -> Markup:
    """Horizontal rules with their values in the format `form`, and training steps below."""
    right = frame.width - frame.margin_right
    rules = [
        element("line", x1=frame.margin_left, x2=right, y1=frame.y(v), y2=frame.y(v), class_="rule")
        + text(frame.margin_left - 7, frame.y(v) + 4, form.format(v), "end")
        for v in y_ticks
    ]
    base, last = frame.height - frame.margin_bottom + 16, f"step {frame.x1:g}"
    # A step near the right end would overlap the label of the last step.
    free = right - LETTER * (len(last) + 3)
    xs = ticks(frame.x0, frame.x1, 6)
    steps = [
        text(frame.x(v), base, f"{v:g}", "middle")
        for v in xs
        if v == int(v) and v < frame.x1 and frame.x(v) <= free
    ]
    return join([*rules, *steps, text(right, base, last, "end")])


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers of a range."""
    if not high > low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    # The tolerances absorb rounding errors, which would skip a tick at an end.
    unit = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
    return [round(i * unit, 12) for i in range(first, last + 1)]


def number(value: Any) -> Any:
    """A float with six significant digits; any other value unchanged."""
    return f"{value:.6g}" if isinstance(value, float) else value


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def _commands(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points) if points else ""
