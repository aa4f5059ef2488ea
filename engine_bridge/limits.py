"""Limits: one pure function that holds any proposed allocation to the plan's bounds.

The environment, the daemon and the engine's control socket all call it. Each knob is held on its
own, so a bad value never disturbs another knob; the static plan passes bit for bit. It does not
decide when an allocation is applied or who may propose one.
"""

from __future__ import annotations

import enum
import math
import numbers
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trimtab.engine_bridge.allocation import UNLIMITED, Allocation
from trimtab.engine_bridge.plan import SUM_TOLERANCE, AnyBounds, Plan

Values = tuple[float, ...]


class LimitReason(enum.StrEnum):
    """Why a knob was not applied as proposed; a closed set, fit for a metric's label."""

    NOT_FINITE = "not_finite"
    """An entry is no finite number: the knob keeps its previous value."""
    CLOSED = "closed"
    """The plan does not open the knob: it keeps its static value."""
    CAPACITY = "capacity"
    """More than the engine was started for: the knob keeps its previous value."""
    FLOOR = "floor"
    """An entry was raised to the floor."""
    CEILING = "ceiling"
    """An entry was lowered to the ceiling."""
    CHANGE = "change"
    """An entry went as far as one interval allows."""
    SUM = "sum"
    """Fractions of a whole did not sum to 1 and were scaled."""


@dataclass(frozen=True)
class Limited:
    """One reason for one knob."""

    knob: str
    reason: LimitReason


@dataclass(frozen=True)
class Projection:
    """A lawful allocation, and what had to be changed for it."""

    allocation: Allocation
    limited: tuple[Limited, ...] = ()
    """What was changed, in the order of the knobs; empty if nothing was."""

    @property
    def reasons(self) -> tuple[LimitReason, ...]:
        """The reasons without the knobs, each once, in the order of `LimitReason`."""
        found = {limited.reason for limited in self.limited}
        return tuple(reason for reason in LimitReason if reason in found)


_KNOBS = (
    "weights",
    "kv_fractions",
    "prefill_budget_tokens",
    "prefill_shares",
    "retention",
    "slack_fraction",
    "low_tier_chunk_share",
    "shed_at",
    "draft_tokens",
    "max_running",
    "max_num_seqs",
)
_WHOLES = ("kv_fractions", "prefill_shares")
_CAPS = ("max_running", "max_num_seqs")


def project(
    proposed: Allocation,
    previous: Allocation,
    plan: Plan,
    *,
    capacity_max_num_seqs: int | None = None,
) -> Projection:
    """Hold a proposed allocation to floors, ceilings, greatest changes and sums.

    Args:
        proposed: What a policy asks for; any numbers, infinite, huge and NaN included.
        previous: What the engine keeps to now. A knob of it that is itself outside the plan's
            bounds counts as having its static value.
        plan: The bounds, and the static values of closed knobs.
        capacity_max_num_seqs: What the engine was started for; without it, what the plan says.

    Returns:
        The nearest lawful allocation, with the version of `proposed`. The static plan as a whole is
        lawful after whatever came before: falling back takes one interval, not many.

    Raises:
        AllocationError: a tuple has too many or too few entries for the plan.
    """
    return Limits(plan, capacity_max_num_seqs=capacity_max_num_seqs).project(proposed, previous)


class Limits:
    """The bounds of one plan on one engine, read off once; whoever projects often keeps it."""

    def __init__(self, plan: Plan, *, capacity_max_num_seqs: int | None = None) -> None:
        """Read the bounds; the capacity is as for `project`."""
        self._plan = plan
        self._static = static = Allocation.static(plan)
        if capacity_max_num_seqs is None:
            capacity_max_num_seqs = plan.engine.max_num_seqs
        self._fits = capacity_max_num_seqs is None or (
            static.max_num_seqs == UNLIMITED or static.max_num_seqs <= capacity_max_num_seqs
        )
        self._knobs: list[_Knob] = []
        for name in _KNOBS:
            bounds: AnyBounds | None = getattr(plan.controller.bounds, name)
            default = getattr(static, name)
            capacity = capacity_max_num_seqs if name == "max_num_seqs" else None
            lawful = bounds is not None and _lawful(
                _values(default), bounds, cap=name in _CAPS, whole=name in _WHOLES,
                capacity=capacity,
            )  # fmt: skip
            self._knobs.append(_Knob(name, bounds, default, capacity, lawful))

    def project(self, proposed: Allocation, previous: Allocation) -> Projection:
        """As the function `project`."""
        proposed.check_shape(self._plan)
        previous.check_shape(self._plan)
        if self._fits and replace(proposed, version=self._static.version) == self._static:
            return Projection(proposed)
        held: dict[str, Any] = {}
        limited: list[Limited] = []
        for name, bounds, default, capacity, lawful in self._knobs:
            asked, before = getattr(proposed, name), getattr(previous, name)
            if lawful and asked == default and before == default and type(asked) is type(default):
                held[name] = default
                continue
            if bounds is None:
                held[name] = default
                reasons = set() if _same(asked, default) else {LimitReason.CLOSED}
            else:
                values, reasons = _hold_knob(
                    name, _values(asked), _values(before), _values(default), bounds, capacity
                )
                typed = tuple(map(int, values)) if bounds.integer else values
                held[name] = typed if isinstance(default, tuple) else typed[0]
            if reasons:
                limited += [Limited(name, reason) for reason in LimitReason if reason in reasons]
        return Projection(replace(proposed, **held), tuple(limited))


class _Knob(NamedTuple):
    name: str
    bounds: AnyBounds | None
    default: Any
    capacity: int | None
    lawful: bool
    """Whether the static value is inside the bounds: then asking for it again changes nothing."""


def _hold_knob(
    knob: str,
    asked: Values,
    previous: Values,
    static: Values,
    bounds: AnyBounds,
    capacity: int | None,
) -> tuple[Values, set[LimitReason]]:
    """Hold one knob; scalars come as tuples of one."""
    cap, whole = knob in _CAPS, knob in _WHOLES
    if not _lawful(previous, bounds, cap=cap, whole=whole, capacity=capacity):
        previous = static
    if capacity is not None:
        previous = tuple(v if v == UNLIMITED else min(v, capacity) for v in previous)
    if not all(math.isfinite(value) for value in asked):
        return previous, {LimitReason.NOT_FINITE}
    if capacity is not None and any(capacity < value != UNLIMITED for value in asked):
        return previous, {LimitReason.CAPACITY}
    reasons: set[LimitReason] = set()
    if whole:
        return _hold_whole(asked, previous, bounds, reasons), reasons
    held = []
    for value, before, default in zip(asked, previous, static, strict=True):
        if cap and value == UNLIMITED and UNLIMITED in (before, default):
            held.append(value)
            continue
        lowest, highest = bounds.reach(bounds.ceiling if before == UNLIMITED else before)
        value = round(value) if bounds.integer else value
        _note(value, lowest, highest, bounds, reasons)
        held.append(min(max(value, lowest), highest))
    return tuple(held), reasons


def _hold_whole(
    asked: Values, previous: Values, bounds: AnyBounds, reasons: set[LimitReason]
) -> Values:
    """Hold fractions of a whole: scaled to sum 1, then moved least to where they may be."""
    ranges = [bounds.reach(before) for before in previous]
    for value in asked:
        if value < 0:
            reasons.add(LimitReason.FLOOR)
    fractions = tuple(max(value, 0.0) for value in asked)
    if not _sums_to_one(fractions):
        reasons.add(LimitReason.SUM)
        greatest = max(fractions)
        if greatest == 0:
            return previous
        # By the greatest first: the sum of huge numbers would overflow.
        scaled = [value / greatest for value in fractions]
        total = math.fsum(scaled)
        fractions = tuple(value / total for value in scaled)
    for value, (lowest, highest) in zip(fractions, ranges, strict=True):
        _note(value, lowest, highest, bounds, reasons)
    inside = all(low <= value <= high for value, (low, high) in zip(fractions, ranges, strict=True))
    return fractions if inside else _shift_into(fractions, ranges, previous)


def _shift_into(fractions: Values, ranges: list[tuple[float, float]], previous: Values) -> Values:
    """Euclidean projection onto the ranges with sum 1: one shift for all, then clipped."""

    def shifted(by: float) -> Values:
        return tuple(
            min(max(value + by, low), high)
            for value, (low, high) in zip(fractions, ranges, strict=True)
        )

    least, most = -2.0, 2.0
    # Bisection to the last bit: the sum rises with the shift, and -2 and 2 clip every entry.
    for _ in range(64):
        middle = (least + most) / 2
        if middle in (least, most):
            break
        if math.fsum(shifted(middle)) < 1:
            least = middle
        else:
            most = middle
    held = shifted(most)
    return held if _sums_to_one(held) else previous


def _note(
    value: float, lowest: float, highest: float, bounds: AnyBounds, reasons: set[LimitReason]
) -> None:
    if value < bounds.floor:
        reasons.add(LimitReason.FLOOR)
    elif value > bounds.ceiling:
        reasons.add(LimitReason.CEILING)
    elif not lowest <= value <= highest:
        reasons.add(LimitReason.CHANGE)


def _lawful(
    values: Values, bounds: AnyBounds, *, cap: bool, whole: bool, capacity: int | None
) -> bool:
    """Whether a knob's values could have come out of a projection."""
    ceiling = bounds.ceiling if capacity is None else min(bounds.ceiling, capacity)
    return all(
        (cap and value == UNLIMITED)
        or (bounds.floor <= value <= ceiling and not (bounds.integer and value % 1))
        for value in values
    ) and (not whole or _sums_to_one(values))


def _sums_to_one(values: Values) -> bool:
    return abs(sum(values) - 1) <= SUM_TOLERANCE


def _values(knob: object) -> Values:
    """A knob's entries as floats; what is no number becomes NaN."""
    entries = knob if isinstance(knob, tuple) else (knob,)
    return tuple([v if type(v) is float else _number(v) for v in entries])


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf  # An integer beyond every float, of either sign.


def _same(asked: object, static: object) -> bool:
    return _values(asked) == _values(static)
