"""What of a plan may be tuned, and within which bounds: dimensions for a search.

A point is a number for each dimension. The plan's own point gives its own values back, bit for
bit; every other point gives a lawful plan with values that are short to read. Nothing here runs or
searches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan

Path = tuple[str, ...]
"""Where a value is in a plan, key by key."""
Changes = Mapping[Path, float]
"""New values by their place; whole numbers are int."""

_LEAST_RATIO = 1e-3
"""A share searched in ratios goes down to this part of its ceiling, where its floor is lower."""
_DIGITS = 3
_SHARE_PLACES = 4
_SUM_TOLERANCE = 1e-12


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One axis of the search."""

    name: str
    low: float
    high: float
    start: float
    """The plan's own place on the axis."""
    log: bool
    """Searched in ratios rather than in differences."""


@dataclass(frozen=True)
class _Value:
    """A value with an axis of its own."""

    path: Path
    axis: Dimension
    whole: bool = False

    @property
    def axes(self) -> tuple[Dimension, ...]:
        return (self.axis,)

    def decode(self, point: Mapping[str, float]) -> Iterator[tuple[Path, float]]:
        at = point[self.axis.name]
        if at == self.axis.start:
            return
        if self.whole:
            yield self.path, round(_short(at, self.axis.low, self.axis.high))
        else:
            yield self.path, _short(at, self.axis.low, self.axis.high)


@dataclass(frozen=True)
class _Split:
    """Shares that sum to 1: each axis says where between its least and greatest a share lies.

    The bounds of a share are those that leave lawful room for the shares after it, so that every
    point is lawful; the last share is what is left.
    """

    paths: tuple[Path, ...]
    start: tuple[float, ...]
    floor: float
    ceiling: float

    @property
    def axes(self) -> tuple[Dimension, ...]:
        found = []
        left = 1.0
        for place, share in enumerate(self.start[:-1]):
            low, high = self._reach(place, left)
            at = (share - low) / (high - low) if high > low else 0.5
            name = ".".join(self.paths[place])
            at = min(max(at, 0.0), 1.0)
            found.append(Dimension(name=name, low=0.0, high=1.0, start=at, log=False))
            left -= share
        return tuple(found)

    def decode(self, point: Mapping[str, float]) -> Iterator[tuple[Path, float]]:
        axes = self.axes
        if all(point[axis.name] == axis.start for axis in axes):
            return
        shares: list[float] = []
        for place, axis in enumerate(axes):
            low, high = self._reach(place, 1.0 - math.fsum(shares))
            share = min(max(low + point[axis.name] * (high - low), low), high)
            rounded = round(share, _SHARE_PLACES)
            shares.append(rounded if low <= rounded <= high else share)
        left = 1.0 - math.fsum(shares)
        rounded = round(left, _SHARE_PLACES)
        # Only the last bits may change here: the shares must sum to 1 and stay inside the bounds.
        left = rounded if abs(rounded - left) < _SUM_TOLERANCE else left
        shares.append(self._inside(left))
        yield from zip(self.paths, shares, strict=True)

    def _reach(self, place: int, left: float) -> tuple[float, float]:
        after = len(self.start) - place - 1
        low = self._inside(left - after * self.ceiling)
        return low, max(low, self._inside(left - after * self.floor))

    def _inside(self, share: float) -> float:
        return min(max(share, self.floor), self.ceiling)


class Space:
    """All that may be tuned of one plan on one engine."""

    def __init__(self, plan: Plan, spec: EngineSpec) -> None:
        """Find the dimensions.

        A knob is left out where the plan closes it, freezes it or switches its rule off. The least
        of the tiers' weights stays as it is: weights count against each other.

        Args:
            plan: where the search starts, and the bounds.
            spec: the engine, for the largest step that it takes.
        """
        self._plan = plan
        self._parts: tuple[_Value | _Split, ...] = (
            *_weights(plan),
            *_splits(plan),
            *_prefill(plan, spec),
            *_retention(plan),
            *_sheds(plan),
        )
        self.dimensions: tuple[Dimension, ...] = tuple(
            axis for part in self._parts for axis in part.axes
        )

    @property
    def start(self) -> dict[str, float]:
        """The plan's own point."""
        return {axis.name: axis.start for axis in self.dimensions}

    @property
    def knobs(self) -> tuple[tuple[Path, ...], ...]:
        """The values that change together: one each, or all shares of a whole."""
        return tuple(
            part.paths if isinstance(part, _Split) else (part.path,) for part in self._parts
        )

    def changes(self, point: Mapping[str, float]) -> dict[Path, float]:
        """What a point changes of the plan; empty for the plan's own."""
        found: dict[Path, float] = {}
        for part in self._parts:
            for path, value in part.decode(point):
                if value != value_at(self._plan, path):
                    found[path] = value
        return found


def value_at(plan: Plan, path: Path) -> float:
    """The number at a place of a plan."""
    found: object = plan
    for key in path:
        found = found[key] if isinstance(found, dict) else getattr(found, key)
    if not isinstance(found, int | float):
        raise TypeError(f"{'.'.join(path)} of plan {plan.name} is no number")
    return found


def changed(plan: Plan, changes: Changes) -> Plan:
    """The plan with new values, checked again.

    Raises:
        pydantic.ValidationError: a value is out of bounds: a fault of the space.
    """
    data = plan.model_dump(mode="python")
    for path, value in changes.items():
        section = data
        for key in path[:-1]:
            section = section[key]
        section[path[-1]] = value
    return Plan.model_validate(data)


def _weights(plan: Plan) -> Iterator[_Value]:
    bounds = plan.controller.bounds.weights
    if bounds.max_change_factor == 1:
        return
    lowest = min(plan.tiers, key=lambda name: plan.tiers[name].weight)
    for name, tier in plan.tiers.items():
        if name != lowest:
            path = ("tiers", name, "weight")
            yield from _value(path, tier.weight, bounds.floor, bounds.ceiling, log=True)


def _splits(plan: Plan) -> Iterator[_Split]:
    bounds, rules = plan.controller.bounds, plan.rules
    if rules.kv_pools and bounds.kv_fractions.max_change:
        fractions: dict[Path, float] = {
            ("pools", name): share for name, share in plan.pools.items()
        }
        yield from _split(fractions, bounds.kv_fractions.floor, bounds.kv_fractions.ceiling)
    if rules.prefill_budget and rules.prefill_shares and bounds.prefill_shares.max_change:
        shares: dict[Path, float] = {
            ("tiers", n, "prefill_share"): t.prefill_share for n, t in plan.tiers.items()
        }
        floor = max(bounds.prefill_shares.floor, 10.0**-_SHARE_PLACES)
        yield from _split(shares, floor, bounds.prefill_shares.ceiling)


def _prefill(plan: Plan, spec: EngineSpec) -> Iterator[_Value]:
    bounds, rules = plan.controller.bounds, plan.rules
    budget = plan.prefill.budget_tokens
    if rules.prefill_budget and bounds.prefill_budget_tokens.max_change_factor > 1:
        # More than the engine's largest step makes no difference.
        largest = plan.engine.max_num_batched_tokens or spec.max_num_batched_tokens
        yield from _value(
            ("prefill", "budget_tokens"),
            budget,
            max(bounds.prefill_budget_tokens.floor, plan.prefill.min_chunk_tokens),
            max(budget, min(bounds.prefill_budget_tokens.ceiling, largest)),
            log=True,
            whole=True,
        )
    slack, low_tier = bounds.slack_fraction, bounds.low_tier_chunk_share
    if rules.slack_chunk and slack is not None and slack.max_change:
        path = ("slack", "slack_fraction")
        yield from _value(path, plan.slack.slack_fraction, slack.floor, slack.ceiling)
    if rules.slack_chunk and low_tier is not None and low_tier.max_change:
        path = ("slack", "low_tier_chunk_share")
        least = max(low_tier.floor, _LEAST_RATIO * low_tier.ceiling)
        share = plan.slack.low_tier_chunk_share
        yield from _value(path, share, min(least, share), low_tier.ceiling, log=True)


def _retention(plan: Plan) -> Iterator[_Value]:
    bounds = plan.controller.bounds.retention
    if bounds is None or bounds.max_change_factor == 1 or plan.retention.eviction != "scaled_age":
        return
    ceiling = min(bounds.ceiling, 1.0)
    for name, kind in plan.retention.classes.items():
        path = ("retention", "classes", name, "factor")
        yield from _value(path, kind.factor, bounds.floor, ceiling, log=True)


def _sheds(plan: Plan) -> Iterator[_Value]:
    bounds = plan.controller.bounds.shed_at
    if bounds is None or not bounds.max_change or not plan.rules.late_shedding:
        return
    for name, tier in plan.tiers.items():
        if tier.shed.mode != "never":
            path = ("tiers", name, "shed", "at_fraction")
            yield from _value(path, tier.shed.at_fraction, bounds.floor, bounds.ceiling)


def _value(
    path: Path, start: float, low: float, high: float, *, log: bool = False, whole: bool = False
) -> Iterator[_Value]:
    if low < high:
        name = ".".join(path)
        axis = Dimension(name=name, low=float(low), high=float(high), start=float(start), log=log)
        yield _Value(path, axis, whole)


def _split(shares: Mapping[Path, float], floor: float, ceiling: float) -> Iterator[_Split]:
    if len(shares) > 1 and floor * len(shares) < 1 < ceiling * len(shares):
        yield _Split(tuple(shares), tuple(shares.values()), floor, ceiling)


def _short(value: float, low: float, high: float) -> float:
    """The value with few digits, where that stays inside the bounds."""
    short = float(f"{value:.{_DIGITS}g}")
    return short if low <= short <= high else value


def shown(value: float) -> str:
    """A value as a plan file has it."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
