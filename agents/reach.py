"""How far from the static plan an allocation may be, and what lies between the two.

Pure functions of allocations. The plan's own bounds are `trimtab.engine_bridge.limits`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from trimtab.engine_bridge.allocation import Allocation

Values = tuple[float, ...]

_WHOLES: Final = ("kv_fractions", "prefill_shares")
_DIFFERENCES: Final = ("slack_fraction",)
_LEAST_DISTANCE: Final = 1e-6
KNOBS: Final = tuple(field.name for field in fields(Allocation) if field.name != "version")
"""Every knob of an allocation."""


def within_reach(
    proposed: Allocation, static: Allocation, reach: Mapping[str, float]
) -> Allocation:
    """The proposal with every knob moved into its reach of the static plan.

    Each entry lies between static x exp(-reach) and static x exp(reach), for `slack_fraction`
    between static - reach and static + reach. Fractions of a whole are scaled to the static sum
    and then drawn towards the static ones all together, so that the sum stays. What lies inside
    comes back bit for bit.

    Args:
        proposed: Finite numbers, of the static plan's shape.
        static: What the reach is measured from.
        reach: By knob; a knob without one stays static.
    """
    held: dict[str, Any] = {}
    for knob in KNOBS:
        home, asked = getattr(static, knob), getattr(proposed, knob)
        if asked == home or knob not in reach:
            held[knob] = home
            continue
        ranges = [_range(knob, value, reach[knob]) for value in _entries(home)]
        hold = _draw_in if knob in _WHOLES else _clip
        held[knob] = _as(home, hold(_entries(asked), _entries(home), ranges))
    return replace(proposed, **held)


def between(static: Allocation, proposed: Allocation, part: float) -> Allocation:
    """The static plan with a part of the proposal's residual: 0 is static, 1 is proposed.

    Weights, tokens and counts are interpolated geometrically, as their bounds are factors,
    fractions linearly, so that sums stay.
    """
    if part <= 0:
        return replace(static, version=proposed.version)
    if part >= 1:
        return proposed
    held: dict[str, Any] = {}
    for knob in KNOBS:
        home, asked = getattr(static, knob), getattr(proposed, knob)
        if asked != home:
            mix = _linear if knob in (*_WHOLES, *_DIFFERENCES) else _geometric
            held[knob] = _as(home, _mixed(mix, _entries(home), _entries(asked), part))
    return replace(proposed, **held)


def distance(allocation: Allocation, static: Allocation, reach: Mapping[str, float]) -> float:
    """How far an allocation is from static, in [0, 1]: 0 only there, 1 with every knob at its end.

    The root mean square over the knobs of the largest entry's residual over the knob's reach.
    """
    if replace(allocation, version=static.version) == static:
        return 0.0
    squares = [_part_used(knob, allocation, static, reach[knob]) ** 2 for knob in reach]
    return max(math.sqrt(math.fsum(squares) / max(len(squares), 1)), _LEAST_DISTANCE)


def _part_used(knob: str, allocation: Allocation, static: Allocation, reach: float) -> float:
    """The largest part of its reach that an entry of a knob uses, at most 1."""
    used = 0.0
    pairs = zip(_entries(getattr(allocation, knob)), _entries(getattr(static, knob)), strict=True)
    for value, home in pairs:
        if value == home:
            continue
        both = value > 0 and home > 0
        gap = abs(value - home) if knob in _DIFFERENCES or not both else abs(math.log(value / home))
        used = max(used, gap / reach if reach > 0 else 1.0)
    return min(used, 1.0)


def _mixed(
    mix: Callable[[float, float, float], float], home: Values, asked: Values, part: float
) -> Values:
    return tuple(
        start if end == start else mix(start, end, part)
        for start, end in zip(home, asked, strict=True)
    )


def _linear(start: float, end: float, part: float) -> float:
    return start + part * (end - start)


def _geometric(start: float, end: float, part: float) -> float:
    if start <= 0 or end <= 0:
        return _linear(start, end, part)
    return start * (end / start) ** part


def _range(knob: str, home: float, reach: float) -> tuple[float, float]:
    if knob in _DIFFERENCES:
        return home - reach, home + reach
    return home * math.exp(-reach), home * math.exp(reach)


def _clip(asked: Values, home: Values, ranges: list[tuple[float, float]]) -> Values:
    return tuple(
        min(max(value, low), high) for value, (low, high) in zip(asked, ranges, strict=True)
    )


def _draw_in(asked: Values, home: Values, ranges: list[tuple[float, float]]) -> Values:
    """Fractions of a whole, drawn towards the static ones until every entry is in its range."""
    fractions = tuple(max(value, 0.0) for value in asked)
    most = max(fractions)
    if most == 0:
        return home
    # By the greatest first: the sum of huge numbers would overflow.
    total = math.fsum(value / most for value in fractions)
    whole = math.fsum(home)
    if abs(total * most - whole) > 1e-9 * whole:
        fractions = tuple(value / most / total * whole for value in fractions)
    part = 1.0
    for value, start, (low, high) in zip(fractions, home, ranges, strict=True):
        if value > high:
            part = min(part, (high - start) / (value - start))
        elif value < low:
            part = min(part, (start - low) / (start - value))
    return fractions if part >= 1 else _mixed(_linear, home, fractions, part)


def _entries(knob: Any) -> Values:
    return knob if isinstance(knob, tuple) else (knob,)


def _as(home: Any, values: Values) -> Any:
    """The values in the type of the static knob."""
    whole = isinstance(home[0] if isinstance(home, tuple) else home, int)
    typed = tuple(round(value) for value in values) if whole else values
    return typed if isinstance(home, tuple) else typed[0]
