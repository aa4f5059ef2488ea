"""What a tier's attainment costs in everybody's goodput, as its reserve moves: the frontier.

It takes counts by time bin of runs on the same arrivals and judges the points against each other;
it runs nothing (see `sweep`). Intervals are of a moving-block bootstrap over time and seeds
(`trimtab.training.whatif.statistics`) with the same draws for every point, so that any two points
are paired. What a bootstrap cannot tell apart is not ranked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.training.whatif.statistics import RESAMPLES, Interval, draw_bin_counts

FloatArray = npt.NDArray[np.float64]

_SEED = 20_237


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What one point served, one row a seed; shapes (seeds, BINS)."""

    asked: FloatArray
    """Requests of the tier."""
    attained: FloatArray
    """Those within all targets."""
    good_tokens: FloatArray
    """Output tokens of requests within their targets, of all tiers."""
    others_good_tokens: FloatArray
    """Of the other tiers alone."""
    weighted_good_tokens: FloatArray
    """Of all tiers, each token times its tier's value."""
    seconds: float
    """Length of a bin."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One plan of a sweep: where it lies, and what it came to."""

    reserve: float
    """Part of the whole that is reserved for the tier; the plan's own of the first moved knob."""
    is_plan: bool
    """Whether it is the static plan as given."""
    within_bounds: bool
    """Whether a controller of the plan could set it."""
    counts: Counts
    tier_attainment: Mapping[str, float]
    """By tier, mean over the seeds; NaN without requests."""
    usd_per_1m_good_tokens: float
    """The engine's cost a million good tokens, mean over the seeds."""
    tier_usd_per_hour: float
    """What the tier pays, mean over the seeds."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a frontier; goodput in output tokens a second."""

    reserve: float
    is_plan: bool
    within_bounds: bool
    attainment: Interval
    """The tier's."""
    goodput: Interval
    """Of all tiers."""
    others_goodput: Interval
    weighted_goodput: Interval
    attainment_gain: Interval
    """Against the static plan, paired."""
    goodput_gain: Interval
    forgone_usd_per_hour: Interval
    """What the goodput that is missing to the point with the most would cost there."""
    usd_per_1m_good_tokens: float
    tier_usd_per_hour: float
    tier_attainment: Mapping[str, float]
    dominated: bool = False
    """Another point is at least as good in both, and better in one beyond chance."""
    knee: bool = False
    """Where the frontier bends most."""


@dataclass(frozen=True, kw_only=True)
class Price:
    """What attainment costs between two points of the frontier."""

    reserve_from: float
    """Reserve of the point with the most goodput."""
    reserve_to: float
    """Reserve of the point with the most attainment."""
    attainment_points: Interval
    """Gained, in points (hundredths)."""
    usd_per_hour: Interval
    """Of the engine's cost, for the goodput that is lost on the way."""
    usd_per_hour_a_point: Interval

    @property
    def shown(self) -> bool:
        """Whether both the gain and the loss are beyond chance: else there is nothing to buy."""
        return self.attainment_points.low > 0 and self.usd_per_hour.low > 0


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """One tier's frontier under one way of moving its reserve."""

    tier: str
    knobs: tuple[str, ...]
    usd_per_hour: float
    points: tuple[Point, ...]
    """By reserve; the static plan's is among them, marked."""
    price: Price
    opportunity_usd_per_hour: Interval
    """What the others lose under the static plan against the least reserve, at the plan's cost a
    good token; negative where they gain."""

    @property
    def plan(self) -> Point:
        """The static plan's point."""
        return next(point for point in self.points if point.is_plan)

    @property
    def knee(self) -> Point | None:
        """Where the frontier bends; None where there is no trade."""
        return next((point for point in self.points if point.knee), None)

    @property
    def matters(self) -> bool:
        """Whether any point differs from the plan's in attainment or goodput beyond chance."""
        return any(p.attainment_gain.settled or p.goodput_gain.settled for p in self.points)


def find_frontier(
    settings: Sequence[Setting], *, tier: str, knobs: Sequence[str], usd_per_hour: float
) -> Frontier:
    """Judge the points of one sweep, one of which is the static plan."""
    settings = sorted(settings, key=lambda one: (one.reserve, one.is_plan))
    drawn = _Drawn(settings)
    plan = next(i for i, one in enumerate(settings) if one.is_plan)
    dominated = _dominated(drawn)
    kept = [i for i in range(len(settings)) if not dominated[i]]
    most = max(kept, key=lambda i: (drawn.goodput[i, 0], drawn.attainment[i, 0]))
    best = max(kept, key=lambda i: (drawn.attainment[i, 0], drawn.goodput[i, 0]))
    price = _price(drawn, settings, most, best, usd_per_hour)
    knee = _knee(drawn, kept, most, best) if price.shown else None
    points = tuple(
        replace(
            _point(drawn, settings[i], i, plan=plan, most=most, usd_per_hour=usd_per_hour),
            dominated=bool(dominated[i]),
            knee=i == knee,
        )
        for i in range(len(settings))
    )
    good = drawn.goodput[plan]
    # Where nothing good is served there is nothing to lose.
    lost = np.divide(drawn.others[0] - drawn.others[plan], good, out=0 * good, where=good > 0)
    return Frontier(
        tier=tier,
        knobs=tuple(knobs),
        usd_per_hour=usd_per_hour,
        points=points,
        price=price,
        opportunity_usd_per_hour=_interval(usd_per_hour * lost),
    )


class _Drawn:
    """Figures of every point, shape (points, 1 + RESAMPLES): as run, then under each draw."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        seeds, bins = settings[0].counts.asked.shape
        counts = draw_bin_counts(seeds, RESAMPLES, np.random.default_rng(_SEED))
        weights = np.concatenate([np.ones((1, seeds * bins)), counts.reshape(RESAMPLES, -1)])

        def sums(columns: list[FloatArray]) -> FloatArray:
            return np.stack([weights @ column.ravel() for column in columns])

        all_counts = [one.counts for one in settings]
        seconds = weights.sum(axis=1) * all_counts[0].seconds
        asked = sums([c.asked for c in all_counts])
        attained = sums([c.attained for c in all_counts])
        self.attainment = np.where(asked > 0, attained / np.maximum(asked, 1), np.nan)
        self.goodput = sums([c.good_tokens for c in all_counts]) / seconds
        self.others = sums([c.others_good_tokens for c in all_counts]) / seconds
        self.weighted = sums([c.weighted_good_tokens for c in all_counts]) / seconds


def _point(
    drawn: _Drawn, setting: Setting, i: int, *, plan: int, most: int, usd_per_hour: float
) -> Point:
    return Point(
        reserve=setting.reserve,
        is_plan=setting.is_plan,
        within_bounds=setting.within_bounds,
        attainment=_interval(drawn.attainment[i]),
        goodput=_interval(drawn.goodput[i]),
        others_goodput=_interval(drawn.others[i]),
        weighted_goodput=_interval(drawn.weighted[i]),
        attainment_gain=_interval(drawn.attainment[i] - drawn.attainment[plan]),
        goodput_gain=_interval(drawn.goodput[i] - drawn.goodput[plan]),
        forgone_usd_per_hour=_interval(_forgone(drawn, i, most, usd_per_hour)),
        usd_per_1m_good_tokens=setting.usd_per_1m_good_tokens,
        tier_usd_per_hour=setting.tier_usd_per_hour,
        tier_attainment=dict(setting.tier_attainment),
    )


def _dominated(drawn: _Drawn) -> npt.NDArray[np.bool_]:
    """Points that another one beats: no worse in either mean, and in one better beyond chance."""
    count = len(drawn.goodput)
    beaten = np.zeros(count, np.bool_)
    for i in range(count):
        for j in range(count):
            gains = [rows[j] - rows[i] for rows in (drawn.attainment, drawn.goodput)]
            if all(gain[0] >= 0 for gain in gains):
                beaten[i] |= any(_interval(gain).low > 0 for gain in gains)
    return beaten


def _price(
    drawn: _Drawn, settings: Sequence[Setting], most: int, best: int, usd_per_hour: float
) -> Price:
    gained = 100 * (drawn.attainment[best] - drawn.attainment[most])
    paid = _forgone(drawn, best, most, usd_per_hour)
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(gained > 0, paid / gained, np.nan)
    return Price(
        reserve_from=settings[most].reserve,
        reserve_to=settings[best].reserve,
        attainment_points=_interval(gained),
        usd_per_hour=_interval(paid),
        usd_per_hour_a_point=_interval(each),
    )


def _forgone(drawn: _Drawn, i: int, most: int, usd_per_hour: float) -> FloatArray:
    """USD an hour that the goodput missing to the point `most` costs there."""
    top = drawn.goodput[most]
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(top > 0, (top - drawn.goodput[i]) / top, np.nan)
    return np.asarray(usd_per_hour * part)


def _knee(drawn: _Drawn, kept: Sequence[int], most: int, best: int) -> int | None:
    """The kept point that lies furthest beyond the straight line between the two ends."""
    goodput, attainment = drawn.goodput[:, 0], drawn.attainment[:, 0]
    across = (goodput - goodput[best]) / (goodput[most] - goodput[best])
    up = (attainment - attainment[most]) / (attainment[best] - attainment[most])
    inside = [i for i in kept if i not in (most, best)]
    knee = max(inside, key=lambda i: across[i] + up[i], default=None)
    return knee if knee is not None and across[knee] + up[knee] > 1 else None


def _interval(row: FloatArray) -> Interval:
    drawn = row[1:][np.isfinite(row[1:])]
    if not len(drawn) or not np.isfinite(row[0]):
        return Interval(mean=float("nan"), low=float("nan"), high=float("nan"))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Interval(mean=float(row[0]), low=float(low), high=float(high))
