"""Small SVG charts as text: lines, stacked areas and intervals over shared axes.

They take their colours from classes of the page's style sheet. They know nothing of what they plot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

WIDTH = 340
HEIGHT = 170
LEFT, RIGHT, TOP, BOTTOM = 48, 10, 10, 28
_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)
_MOST_TIME_TICKS = 5


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The vertical axis of a chart, shared by the charts that are to be compared."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    scale: Callable[[FloatArray], FloatArray] = field(default=lambda values: values)
    """Monotone map of values before they are placed."""

    def y(self, values: npt.ArrayLike) -> FloatArray:
        """Pixels from the top; values outside the axis are drawn on its edge."""
        low, high = self.scale(np.array([self.low, self.high]))
        clipped = np.clip(np.asarray(values, np.float64), self.low, self.high)
        part = (self.scale(clipped) - low) / (high - low)
        return np.asarray(HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series; `css` names its colour and dash. NaN values leave a gap."""

    values: FloatArray
    css: str
    stepped: bool = False


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A horizontal line of reference with a short label at its right end."""

    value: float
    label: str = ""
    css: str = "rule"


def linear_axis(highest: float, *, low: float = 0.0, percent: bool = False) -> Axis:
    """An axis from `low` to at least `highest`, with round ticks."""
    span = highest - low if highest > low else 1.0
    step = round_step(span / 4)
    top = low + math.ceil(span / step - 1e-9) * step
    values = [low + i * step for i in range(round((top - low) / step) + 1)]
    text = (lambda v: f"{v * 100:g} %") if percent else short
    return Axis(low=low, high=top, ticks=tuple((v, text(round(v, 9))) for v in values))


def log1p_axis(highest: float) -> Axis:
    """An axis from 0 where each power of ten takes the same room, so that small values show."""
    decades = max(1, math.ceil(math.log10(max(highest, 1.0) + 1e-9)))
    values = [0.0, *(10.0**d for d in range(decades + 1))]
    if decades >= 3:
        # Where decades are close together, the label of 1 would touch that of 0.
        values.remove(1.0)
    if decades > 4:
        values = [v for v in values if v == 0 or round(math.log10(v)) % 2 == 0]
    top = max(10.0**decades, highest)
    return Axis(low=0.0, high=top, ticks=tuple((v, short(v)) for v in values), scale=np.log1p)


def ratio_axis(lowest: float, highest: float) -> Axis:
    """A logarithmic axis of factors around 1, in powers of two."""
    reach = max(abs(math.log2(max(lowest, 1e-6))), abs(math.log2(max(highest, 1e-6))), 0.5)
    top = math.ceil(reach)
    stride = max(1, math.ceil(top / 3))
    powers = [p for p in range(-top, top + 1) if p % stride == 0]
    factors = [(2.0**p, short(2.0**p) if p >= 0 else f"1/{2**-p}") for p in powers]
    ticks = tuple((factor, f"&times;{text}") for factor, text in factors)
    return Axis(low=2.0**-top, high=2.0**top, ticks=ticks, scale=np.log2)


def line_chart(
    *,
    title: str,
    description: str,
    time_s: FloatArray,
    end_s: float,
    axis: Axis,
    lines: Sequence[Line],
    rules: Sequence[Rule] = (),
) -> str:
    """A chart of lines over time."""
    body = [_rule(rule, axis) for rule in rules]
    for line in lines:
        path = _path(_x(time_s, end_s), axis.y(line.values), stepped=line.stepped)
        if path:
            body.append(f'<path class="line {line.css}" d="{path}"/>')
    return _frame(title, description, axis, end_s, body)


def area_chart(
    *,
    title: str,
    description: str,
    time_s: FloatArray,
    end_s: float,
    axis: Axis,
    layers: Sequence[Line],
    rules: Sequence[Rule] = (),
    marks_s: Sequence[float] = (),
) -> str:
    """A chart of layers that add up, the first one at the bottom; `marks_s` are upright lines."""
    across = _x(time_s, end_s)
    floor = np.zeros(len(across))
    body = []
    for layer in layers:
        top = floor + np.nan_to_num(layer.values)
        upper, lower = _points(across, axis.y(top)), _points(across[::-1], axis.y(floor[::-1]))
        if upper:
            body.append(f'<path class="area {layer.css}" d="M{" ".join(upper + lower)}Z"/>')
        floor = top
    body += [_rule(rule, axis) for rule in rules]
    for x in _x(np.asarray(marks_s, np.float64), end_s):
        ends = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
        body.append(f'<line class="rule" {ends}/>')
    return _frame(title, description, axis, end_s, body)


def interval_bar(*, low: float, mean: float, high: float, reach: float, label: str) -> str:
    """A small strip around zero with an interval and its mean; `reach` is its half width.

    The scale is a signed square root, so that a small difference shows beside a large one.
    """
    width, height, middle = 180, 18, 90

    def x(value: float) -> str:
        part = math.copysign(math.sqrt(min(1.0, abs(value) / reach)), value)
        return f"{middle + part * (middle - 6):.1f}"

    side = "gain" if low > 0 else "loss" if high < 0 else "even"
    return (
        f'<svg class="strip" viewBox="0 0 {width} {height}" role="img">'
        f"<title>{escape(label)}</title>"
        f'<line class="zero" x1="{middle}" x2="{middle}" y1="0" y2="{height}"/>'
        f'<line class="ci {side}" x1="{x(low)}" x2="{x(high)}" y1="9" y2="9"/>'
        f'<circle class="dot {side}" cx="{x(mean)}" cy="9" r="4"/></svg>'
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """A list of names with their line or fill."""
    items = []
    for name, css in entries:
        mark = (
            f'<rect class="area {css}" width="26" height="12"/>'
            if css.startswith("f")
            else f'<line class="line {css}" x1="0" x2="26" y1="6" y2="6"/>'
        )
        items.append(
            f'<li><svg class="key" viewBox="0 0 26 12" aria-hidden="true">{mark}</svg> '
            f"{escape(name)}</li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'


def short(value: float, digits: int = 3) -> str:
    """A number with few figures, three of them in at most five characters: 0.25, 12, 3.4k, 2M."""
    for size, mark in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.{digits}g}{mark}"
    return f"{value:.{digits}g}"


def time_label(seconds: float) -> str:
    """A time from the start: "45 s", "12 min", "12:30 min", "2:05 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    size, unit = (60, "min") if whole < 7200 else (3600, "h")
    rest = whole % size * 60 // size
    return f"{whole // size}:{rest:02d} {unit}" if rest else f"{whole // size} {unit}"


def _frame(title: str, description: str, axis: Axis, end_s: float, body: Sequence[str]) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    grid = []
    for value, text in axis.ticks:
        y = float(axis.y([value])[0])
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    seconds = _time_ticks(end_s)
    for at_s, text in zip(seconds, _time_labels(seconds), strict=True):
        x = float(_x(np.array([at_s]), end_s)[0])
        anchor = "start" if at_s == 0 else "end" if x > right - 18 else "middle"
        grid.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{text}</text>'
        )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>"
        f"{''.join(grid)}{''.join(body)}</svg>"
    )


def _rule(rule: Rule, axis: Axis) -> str:
    y = float(axis.y([rule.value])[0])
    line = f'<line class="{rule.css}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    if not rule.label:
        return line
    over = y - 4 if y > TOP + 16 else y + 13
    return (
        f'{line}<text class="note" x="{WIDTH - RIGHT - 2}" y="{over:.1f}" text-anchor="end">'
        f"{escape(rule.label)}</text>"
    )


def _x(time_s: FloatArray, end_s: float) -> FloatArray:
    return np.asarray(LEFT + np.asarray(time_s) / max(end_s, 1e-9) * (WIDTH - LEFT - RIGHT))


def _points(x: FloatArray, y: FloatArray) -> list[str]:
    return [f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True)]


def _path(x: FloatArray, y: FloatArray, *, stepped: bool) -> str:
    """Path data; single points between gaps become short dashes, so that they are seen."""
    parts: list[str] = []
    pen_down = False
    for i in range(len(x)):
        if not np.isfinite(y[i]):
            pen_down = False
            continue
        if not pen_down:
            parts.append(f"M{x[i]:.1f},{y[i]:.1f}h.8")
        elif stepped:
            parts.append(f"H{x[i]:.1f}V{y[i]:.1f}")
        else:
            parts.append(f"L{x[i]:.1f},{y[i]:.1f}")
        pen_down = True
    return "".join(parts)


def round_step(rough: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is no smaller."""
    size = 10.0 ** math.floor(math.log10(rough))
    for factor in (1, 2, 2.5, 5, 10):
        if rough <= factor * size * (1 + 1e-9):
            return factor * size
    return 10 * size


def _time_labels(seconds: Sequence[float]) -> list[str]:
    """Labels of the ticks; a unit that all but the first share is told once, at the last."""
    labels = [time_label(s) for s in seconds]
    units = {text.rsplit(" ", 1)[-1] for text in labels[1:]}
    if len(units) == 1:
        labels[:-1] = [text.rsplit(" ", 1)[0] for text in labels[:-1]]
    return labels


def _time_ticks(end_s: float) -> list[float]:
    for step in _TIME_STEPS_S:
        if end_s / step <= _MOST_TIME_TICKS:
            return [float(i * step) for i in range(int(end_s / step) + 1)]
    step = 86400 * max(1, math.ceil(end_s / 86400 / _MOST_TIME_TICKS))
    return [float(i * step) for i in range(int(end_s / step) + 1)]
