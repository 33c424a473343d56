"""The report's charts, each a function from numbers to one SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from jax_ragrl.report.load import Curve
from jax_ragrl.report.svg import Frame, area, axes, element, joined, path, svg, text, ticks

# Widths in pixels of the page's three sizes of card, so that text keeps its size in all of them.
FULL, WIDE, HALF = 1010, 610, 490


class Bar(NamedTuple):
    """A labelled value from 0 to 100; `strong` bars are drawn in the accent colour."""

    label: str
    value: float
    strong: bool = False


class Line(NamedTuple):
    """A named curve; `class_` is its colour and `faint` leaves it in the background."""

    label: str
    curve: Curve
    class_: str = "c0"
    faint: bool = False
    dots: bool = False


def smooth(values: Sequence[float], span: float) -> tuple[float, ...]:
    """An exponential moving average with weights of `span` steps, corrected for its start."""
    decay, total, weight, out = 1 - 1 / max(span, 1.0), 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        out.append(total / weight)
    return tuple(out)


def smoothed(curve: Curve, least: int = 5) -> Curve:
    """A curve averaged over a sixteenth of its points, and over `least` of a short one."""
    return curve._replace(values=smooth(curve.values, max(least, len(curve.steps) / 16)))


def bar_chart(bars: Sequence[Bar]) -> Markup:
    """Horizontal bars of percentages, the value behind each."""
    left, row, room = 150, 40, WIDE - 150 - 70
    parts = []
    for i, bar in enumerate(bars):
        y, length = i * row + 8, max(1.0, room * min(max(bar.value / 100, 0), 1))
        strong = " strong" if bar.strong else ""
        parts += [
            text(left - 12, y + 17, bar.label, "end", "label" + strong),
            element("rect", x=left, y=y, width=room, height=24, rx=4, class_="track"),
            element("rect", x=left, y=y, width=length, height=24, rx=4, class_="bar" + strong),
            text(left + room + 12, y + 17, f"{bar.value:.1f} %", "start", "label" + strong),
        ]
    names = ", ".join(f"{b.label} {b.value:.1f} %" for b in bars)
    return svg(WIDE, len(bars) * row + 8, f"Accuracy: {names}", *parts)


def interval_chart(mean: float, low: float, high: float) -> Markup:
    """A mean with its interval on an axis that shows zero; all in points."""
    margin = 0.15 * max(high - min(low, 0), 1e-6)
    frame = Frame(300, 64, min(low, 0) - margin, max(high, 0) + margin, 0, 1, left=8, right=8)
    x0, x1, y = frame.x(low), frame.x(high), 20
    marks = [
        text(frame.x(v), 58, f"{v:+g}" if v else "0", "middle")
        for v in ticks(frame.x0, frame.x1, 5)
    ]
    parts = [
        element("line", x1=frame.x(0), x2=frame.x(0), y1=4, y2=42, class_="zero"),
        element("line", x1=8, x2=292, y1=42, y2=42, class_="rule"),
        element("line", x1=x0, x2=x1, y1=y, y2=y, class_="whisker"),
        element("line", x1=x0, x2=x0, y1=y - 6, y2=y + 6, class_="whisker"),
        element("line", x1=x1, x2=x1, y1=y - 6, y2=y + 6, class_="whisker"),
        element("circle", cx=frame.x(mean), cy=y, r=5, class_="mean"),
    ]
    label = f"Gain {mean:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f}"
    return svg(300, 64, label, *parts, *marks)


def line_chart(
    lines: Sequence[Line], label: str, *, width: float = FULL, height: float = 280
) -> Markup:
    """Curves on one pair of axes; the y axis starts at zero unless a value is below it."""
    steps = [s for line in lines for s in line.curve.steps]
    values = [v for line in lines for v in line.curve.values]
    low, high = min([0.0, *values]), max([0.0, *values])
    high = high if high > low else low + 1
    frame = Frame(width, height, min(steps), max(steps), low, low + (high - low) * 1.06)
    parts = [axes(frame, ticks(low, frame.y1, 5), "{:g}")]
    return svg(width, height, label, *parts, *(_curve(frame, line) for line in lines))


def _curve(frame: Frame, line: Line) -> Markup:
    points = [(frame.x(s), frame.y(v)) for s, v in zip(*line.curve, strict=True)]
    class_ = f"line {line.class_}" + (" faint" if line.faint else "")
    drawn = Markup("") if line.dots else path(points, class_)
    if line.dots or len(points) == 1:
        drawn += joined(
            element(
                "circle",
                element("title", f"step {s:g}: {v:.3g}"),
                cx=x,
                cy=y,
                r=3.5,
                class_=f"dot {line.class_}",
            )
            for (x, y), s, v in zip(points, *line.curve, strict=True)
        )
    return drawn


def stacked_areas(
    shares: Mapping[str, Curve], label: str, *, width: float = HALF, height: float = 230
) -> Markup:
    """Shares over steps, stacked in order; what they leave of 100 % stays empty.

    All curves must have the same steps.
    """
    steps = next(iter(shares.values())).steps
    frame = Frame(width, height, min(steps), max(steps), 0, 100)
    base, parts = [0.0] * len(steps), []
    for i, curve in enumerate(shares.values()):
        top = [b + 100 * v for b, v in zip(base, curve.values, strict=True)]
        upper, lower = (
            [(frame.x(s), frame.y(v)) for s, v in zip(steps, ys, strict=True)] for ys in (top, base)
        )
        if len(steps) == 1:  # a single step is a column, not a line
            right = frame.width - frame.right
            upper, lower = [*upper, (right, upper[0][1])], [*lower, (right, lower[0][1])]
        parts.append(area(upper, lower, f"area c{i % 6}"))
        base = top
    return svg(width, height, label, *parts, axes(frame, (0, 25, 50, 75, 100), "{:g} %"))


def share_bar(shares: Mapping[str, float], label: str) -> Markup:
    """One bar cut into shares, in order."""
    at, parts = 0.0, []
    for i, (name, share) in enumerate(shares.items()):
        size = FULL * min(max(share, 0.0), 1.0)
        title = element("title", f"{name}: {100 * share:.0f} %")
        parts.append(
            element("rect", title, x=at, y=0, width=size, height=26, class_=f"area c{i % 6}")
        )
        if size > 60:
            parts.append(text(at + size / 2, 17, f"{100 * share:.0f} %", "middle", "inside"))
        at += size
    return svg(FULL, 26, label, *parts)


def small_chart(curve: Curve, label: str, *, share: bool) -> Markup:
    """A small curve with its smoothed self; shares are drawn from the tenth below them up to 1."""
    lowest, highest = min(curve.values), max(curve.values)
    if share:
        low, high = min(0.9, math.floor(10 * lowest) / 10), 1.0
    else:
        low, high = min(0.0, lowest), max(0.0, highest)
    high = high if high > low else low + 1
    frame = Frame(260, 96, min(curve.steps), max(curve.steps), low, high, 46, 6, 8, 8)
    rules = [
        element("line", x1=46, x2=254, y1=frame.y(v), y2=frame.y(v), class_="rule")
        + text(40, frame.y(v) + 4, f"{v:.2g}", "end")
        for v in (low, high)
    ]
    lines = [Line("", curve, faint=True), Line("", smoothed(curve))]
    return svg(260, 96, label, *rules, *(_curve(frame, line) for line in lines))
