"""A chart of one figure against another, with points and lines through them, as SVG.

It looks like the charts over time (`svg`) and knows nothing of what it plots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from trimtab.training.report.svg import Axis, FloatArray, round_step, short

WIDTH, HEIGHT = 460, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 14, 46


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One point with its interval both ways."""

    x: float
    y: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    css: str
    """Colour, `f0` to `f7`."""
    shape: str = "dot"
    """`dot`, `ring` (hollow) or `square`."""
    label: str = ""
    """Short text beside it."""
    title: str = ""
    """What a pointer over it is told."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line through points in their order."""

    x: FloatArray
    y: FloatArray
    css: str


def span_axis(values: FloatArray, *, percent: bool = False) -> Axis:
    """An axis that just holds the values, with round ticks; it need not begin at 0."""
    low, high = float(values.min()), float(values.max())
    if percent and low >= 1.0:
        # Nothing lies beyond the whole: the axis goes down from it.
        low = 1.0 - 1e-4
    step = round_step(max(high - low, 1e-4 if percent else 1e-9 + abs(high) * 1e-3) / 5)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    ticks = [i * step for i in range(first, last + 1)]
    # As many figures as it takes to tell two ticks apart.
    digits = max(3, math.ceil(math.log10(max(abs(ticks[0]), abs(ticks[-1]), step) / step)) + 1)

    def text(value: float) -> str:
        return f"{100 * value:.{digits}g} %" if percent else short(value, digits)

    # No share is beyond the whole.
    ticks = [min(v, 1.0) for v in ticks] if percent else ticks
    shown = {text(v): v for v in ticks}
    return Axis(low=ticks[0], high=ticks[-1], ticks=tuple((v, t) for t, v in shown.items()))


def scatter_chart(
    *,
    title: str,
    description: str,
    x_axis: Axis,
    y_axis: Axis,
    x_label: str,
    marks: Sequence[Mark],
    curves: Sequence[Curve] = (),
) -> str:
    """The chart as an SVG element."""
    body = [_grid(x_axis, y_axis, x_label)]
    for curve in curves:
        points = zip(_across(x_axis, curve.x), _up(y_axis, curve.y), strict=True)
        path = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<path class="line {curve.css}" d="M{path}"/>')
    body += [_mark(mark, x_axis, y_axis) for mark in marks]
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc>{''.join(body)}</svg>"
    )


def _across(axis: Axis, values: FloatArray) -> FloatArray:
    part = (np.clip(values, axis.low, axis.high) - axis.low) / (axis.high - axis.low)
    return np.asarray(LEFT + part * (WIDTH - LEFT - RIGHT))


def _up(axis: Axis, values: FloatArray) -> FloatArray:
    part = (np.clip(values, axis.low, axis.high) - axis.low) / (axis.high - axis.low)
    return np.asarray(HEIGHT - BOTTOM - part * (HEIGHT - TOP - BOTTOM))


def _grid(x_axis: Axis, y_axis: Axis, x_label: str) -> str:
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    parts = []
    for value, text in y_axis.ticks:
        y = float(_up(y_axis, np.array([value]))[0])
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for value, text in x_axis.ticks:
        x = float(_across(x_axis, np.array([value]))[0])
        anchor = "end" if x > right - 18 else "middle"
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
            f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="{anchor}">{text}</text>'
        )
    middle = (LEFT + right) / 2
    return (
        f"{''.join(parts)}"
        f'<text class="tick" x="{middle:.0f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )


def _mark(mark: Mark, x_axis: Axis, y_axis: Axis) -> str:
    x, low_x, high_x = _across(x_axis, np.array([mark.x, *mark.x_range]))
    y, low_y, high_y = _up(y_axis, np.array([mark.y, *mark.y_range]))
    whiskers = (
        f'<path class="whisker" d="M{low_x:.1f},{y:.1f}H{high_x:.1f}M{x:.1f},{low_y:.1f}'
        f'V{high_y:.1f}"/>'
    )
    told = f"<title>{escape(mark.title or mark.label)}</title>"
    label = _label(mark, float(x), float(y)) if mark.label else ""
    return f"<g>{told}{whiskers}{_shape(mark, float(x), float(y))}</g>{label}"


def _shape(mark: Mark, x: float, y: float) -> str:
    if mark.shape == "square":
        return f'<rect class="{mark.css}" x="{x - 6:.1f}" y="{y - 6:.1f}" width="12" height="12"/>'
    css = f"s{mark.css[1:]} hollow" if mark.shape == "ring" else mark.css
    return f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'


def _label(mark: Mark, x: float, y: float) -> str:
    # A square is drawn over others: its label keeps out of theirs.
    aside = mark.shape == "square"
    left = aside or x > WIDTH - RIGHT - 60
    at = f'x="{x + (-10 if left else 9):.1f}" y="{y + (4 if aside else -8):.1f}"'
    anchor = "end" if left else "start"
    return f'<text class="note" {at} text-anchor="{anchor}">{escape(mark.label)}</text>'
