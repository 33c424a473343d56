"""The charts of the report: functions from numbers to one SVG picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from markupsafe import Markup

from jax_ragrl.report.load import Curve
from jax_ragrl.report.svg import Frame, area, axes, element, join, path, svg, text, ticks

# Widths of the three card sizes in pixels. A picture of this width is not scaled, so that text has
# the same size in all cards.
FULL, WIDE, HALF = 1010, 610, 490
# The width of a card on a phone. Every wide picture has a narrow version of that width, which the
# style sheet shows there: scaled down, its text could not be read.
NARROW = 316
LETTER = 7.5  # pixels, a wide letter of a label on average


class Bar(NamedTuple):
    """A labeled value from 0 to 100; `strong` bars have the accent color."""

    label: str
    value: float
    strong: bool = False


class Line(NamedTuple):
    """A named curve; `class_` is its color, and a `faint` curve is in the background."""

    label: str
    curve: Curve
    class_: str = "c0"
    faint: bool = False
    dots: bool = False


def smooth(values: Sequence[float], span: float) -> tuple[float, ...]:
    """An exponential moving average over about `span` steps, with bias correction."""
    decay, total, weight, averages = 1 - 1 / max(span, 1.0), 0.0, 0.0, []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        averages.append(total / weight)
    return tuple(averages)


def smooth_curve(curve: Curve, min_span: int = 5) -> Curve:
    """A curve averaged over a sixteenth of its points, but at least over `min_span`."""
    return curve._replace(values=smooth(curve.values, max(min_span, len(curve.steps) / 16)))


def at_two_widths(draw: Callable[[float, str], Markup], width: float) -> Markup:
    """A picture of a width, and its narrow version for phones."""
    return join([draw(width, "wide"), draw(NARROW, "narrow")])


def bar_chart(bars: Sequence[Bar]) -> Markup:
    """Horizontal bars of percentages with their values; on a phone their labels are above them."""
    label = "Accuracy: " + ", ".join(f"{b.label} {b.value:.1f} %" for b in bars)
    # Long names, such as `always Planning`, push the bars to the right.
    margin = max([150, *(LETTER * len(bar.label) + 12 for bar in bars)])

    def draw(width: float, class_: str) -> Markup:
        is_wide, parts = class_ == "wide", []
        # Pixels: the left end and the height of bars, the height of rows, and in a row the top of
        # the bar and the baselines of its label and of its value.
        left, size, row, top, base, last = (
            (margin, 24, 40, 8, 25, 25) if is_wide else (0, 18, 52, 22, 14, 36)
        )
        end, gap = ("end", 12) if is_wide else ("start", 10)
        room = width - left - (70 if is_wide else 66)
        for i, bar in enumerate(bars):
            y, strong = i * row, " strong" if bar.strong else ""
            box: dict[str, Any] = {"x": left, "y": y + top, "height": size, "rx": 4}
            length = max(1.0, room * min(max(bar.value / 100, 0), 1))
            parts += [
                text(max(left - 12, 0), y + base, bar.label, end, "label" + strong),
                element("rect", **box, width=room, class_="track"),
                element("rect", **box, width=length, class_="bar" + strong),
                text(left + room + gap, y + last, f"{bar.value:.1f} %", class_="label" + strong),
            ]
        height = len(bars) * row + (8 if is_wide else 0)
        return svg(width, height, label, *parts, class_=class_)

    return at_two_widths(draw, WIDE)


def interval_chart(mean: float, low: float, high: float) -> Markup:
    """A mean with its interval in percentage points, on an axis that includes zero."""
    # Room for the ends of the interval; never 0, which would make the scale degenerate.
    margin = 0.15 * max(high - min(low, 0), 1e-6)
    frame = Frame(
        300, 64, min(low, 0) - margin, max(high, 0) + margin, 0, 1, margin_left=8, margin_right=8
    )
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
    """Curves on common axes; the y axis starts at zero unless a value is negative."""
    steps = [s for line in lines for s in line.curve.steps]
    values = [v for line in lines for v in line.curve.values]
    low, high = min([0.0, *values]), max([0.0, *values])
    # A constant 0 has no range to draw.
    high = high if high > low else low + 1

    def draw(width: float, class_: str) -> Markup:
        frame = Frame(width, height, min(steps), max(steps), low, low + (high - low) * 1.06)
        parts = [axes(frame, ticks(low, frame.y1, 5), "{:g}")]
        parts += [_curve(frame, line) for line in lines]
        return svg(width, height, label, *parts, class_=class_)

    return at_two_widths(draw, width)


def _curve(frame: Frame, line: Line) -> Markup:
    points = [(frame.x(s), frame.y(v)) for s, v in zip(*line.curve, strict=True)]
    class_ = f"line {line.class_}" + (" faint" if line.faint else "")
    picture = Markup("") if line.dots else path(points, class_)
    # A path through one point is invisible, so a single value is a dot.
    if line.dots or len(points) == 1:
        dot = {"r": 3.5, "class_": f"dot {line.class_}"}
        for (x, y), step, value in zip(points, *line.curve, strict=True):
            title = element("title", f"step {step:g}: {value:.3g}")
            picture += element("circle", title, cx=x, cy=y, **dot)
    return picture


def stacked_areas(
    shares: Mapping[str, Curve], label: str, *, width: float = HALF, height: float = 230
) -> Markup:
    """Stacked shares of 0 to 1 over equal steps, in order; the rest up to 100 % stays empty."""
    steps = next(iter(shares.values())).steps

    def draw(width: float, class_: str) -> Markup:
        frame = Frame(width, height, min(steps), max(steps), 0, 100)
        base, parts = [0.0] * len(steps), list[Markup]()
        for i, curve in enumerate(shares.values()):
            top = [b + 100 * v for b, v in zip(base, curve.values, strict=True)]
            upper, lower = (
                [(frame.x(s), frame.y(v)) for s, v in zip(steps, ys, strict=True)]
                for ys in (top, base)
            )
            if len(steps) == 1:  # a single step would be a line without area
                right = frame.width - frame.margin_right
                upper, lower = [*upper, (right, upper[0][1])], [*lower, (right, lower[0][1])]
            parts.append(area(upper, lower, f"area c{i % 6}"))
            base = top
        parts.append(axes(frame, (0, 25, 50, 75, 100), "{:g} %"))
        return svg(width, height, label, *parts, class_=class_)

    return at_two_widths(draw, width)


def share_bar(shares: Mapping[str, float], label: str) -> Markup:
    """One bar divided into shares, in order."""

    def draw(width: float, class_: str) -> Markup:
        x, parts = 0.0, []
        for i, (name, share) in enumerate(shares.items()):
            size, percent = width * min(max(share, 0.0), 1.0), f"{100 * share:.0f} %"
            box = {"x": x, "y": 0, "width": size, "height": 26, "class_": f"area c{i % 6}"}
            parts.append(element("rect", element("title", f"{name}: {percent}"), **box))
            if size > 50:  # pixels: the text fits
                parts.append(text(x + size / 2, 17, percent, "middle", "inside"))
            x += size
        return svg(width, 26, label, *parts, class_=class_)

    return at_two_widths(draw, FULL)


def small_chart(curve: Curve, label: str, *, share: bool) -> Markup:
    """A small chart of a curve and its moving average."""
    lowest, highest = min(curve.values), max(curve.values)
    # Shares near 1 differ by little, so their axis starts just below the lowest one.
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
    lines = [Line("", curve, faint=True), Line("", smooth_curve(curve))]
    return svg(260, 96, label, *rules, *(_curve(frame, line) for line in lines))
