"""Telemetry out of snapshots: counters as differences, levels as they are.

An interval reaches from the one told of last to the newest, however many were missed. Nothing
negative ever comes out. It reads no source and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import did_you_mean
from trimtab.engine_bridge.live.gauges import allocation_of
from trimtab.engine_bridge.live.lookup import Lookup
from trimtab.engine_bridge.live.reading import Notice, NoticeKind
from trimtab.engine_bridge.live.series import ATTAINED, ENGINE_SERIES, TIER_SERIES, Series
from trimtab.engine_bridge.live.snapshot import Snapshot, TelemetryUnavailableError, Unavailable
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry

_ULPS: Final = 1e-9
"""Sums over the files of several processes may come in another order each time."""
_TIME_S: Final = Series("time_s", "engine_time_seconds", False, 1.0)
_WHOLE: Final = frozenset(
    name for name, kind in TierTelemetry.__annotations__.items() if kind in ("int", int)
)


@dataclass(frozen=True)
class _Figures:
    """One snapshot in telemetry's own words; columns by tier, the engine's with one entry."""

    time_s: float
    counters: Mapping[str, tuple[float, ...]]
    levels: Mapping[str, tuple[float, ...]]
    applied: Allocation | None


@dataclass(frozen=True)
class Taken:
    """What a snapshot added."""

    fresh: bool
    """Whether an interval has ended that was not told of before."""
    first_sight: bool
    """Whether these figures are newer than any before; an interval may still be missing."""
    notices: tuple[Notice, ...]


class Assembler:
    """Makes one engine's telemetry; snapshots must come in the order in which they were read."""

    def __init__(self, plan: Plan) -> None:
        """Begin without any figures.

        Args:
            plan: The tiers that must be there.
        """
        self._plan = plan
        self._told: _Figures | None = None
        self._noticed: frozenset[Notice] = frozenset()
        self.latest: Telemetry | None = None
        """The last interval that was told of, as it was then."""

    @property
    def time_s(self) -> float:
        """The engine's time that telemetry has been told up to; NaN before the first figures."""
        return math.nan if self._told is None else self._told.time_s

    def take(self, snapshot: Snapshot, *, due_s: float = -math.inf) -> Taken:
        """Take a snapshot in.

        Args:
            snapshot: All figures of a moment.
            due_s: An interval that ends before this time of the engine is not told of yet.

        Raises:
            TelemetryUnavailableError: a series is missing, is no number, or the tiers are not the
                plan's. What was told of before stays.
        """
        lookup = Lookup(snapshot)
        now = self._read(lookup)
        once = self._once(lookup, now)
        before = self._told
        if before is None:
            self._told = now
            return Taken(False, True, once)
        fell = _fell(before.counters, now.counters)
        restarted = now.time_s < before.time_s
        if not restarted and (now.time_s == before.time_s or now.time_s < due_s):
            return Taken(False, False, once)
        self._told = now
        notices = (*once, *_resets(before, now, restarted, fell))
        since_s = 0.0 if restarted else before.time_s
        if now.time_s <= since_s:
            return Taken(False, True, notices)  # Started again, and no interval has ended since.
        growth = now.counters if fell else _growth(before.counters, now.counters)
        self.latest = self._telemetry(now, growth, now.time_s - since_s)
        return Taken(True, True, notices)

    def _read(self, lookup: Lookup) -> _Figures:
        self._check_tiers(lookup)
        names = self._plan.tier_names
        tier = {series: lookup.entries(series, names) for series in TIER_SERIES}
        engine = {series: lookup.entries(series, ("",)) for series in ENGINE_SERIES}
        lookup.check()
        columns = {**tier, **engine}
        return _Figures(
            time_s=engine[_TIME_S][0],
            counters={s.field: column for s, column in columns.items() if s.counter},
            levels={s.field: column for s, column in columns.items() if not s.counter},
            applied=allocation_of(lookup, self._plan),
        )

    def _check_tiers(self, lookup: Lookup) -> None:
        """All tiers are there, and no other: otherwise it is an engine of another plan."""
        shown = lookup.find(TIER_SERIES[0].name)
        strange = sorted(set(shown or ()) - set(self._plan.tier_names))
        if strange:
            hint = did_you_mean(strange[0], self._plan.tier_names)
            raise TelemetryUnavailableError(
                Unavailable.MALFORMED,
                f"the figures are of tiers {', '.join(sorted(shown or ()))}; those of plan"
                f" {self._plan.name} are {', '.join(self._plan.tier_names)}"
                + (f"; {hint}" if hint else ""),
            )

    def _once(self, lookup: Lookup, now: _Figures) -> tuple[Notice, ...]:
        """Notices of what stays as it is, each told when it begins."""
        holds = set()
        if lookup.renamed:
            pairs = ", ".join(f"{old} is {new}" for old, new in sorted(lookup.renamed.items()))
            holds.add(Notice(NoticeKind.RENAMED, f"series under other names: {pairs}"))
        if now.applied is None:
            text = "the gauges of the applied allocation are not all there"
            holds.add(Notice(NoticeKind.MISSING_SERIES, text))
        new = holds - self._noticed
        self._noticed = frozenset(holds)
        return tuple(sorted(new, key=lambda notice: notice.kind))

    def _telemetry(
        self, now: _Figures, growth: Mapping[str, tuple[float, ...]], interval_s: float
    ) -> Telemetry:
        engine: dict[str, Any] = {
            s.field: now.levels[s.field][0] for s in ENGINE_SERIES if not s.counter
        }
        applied = now.applied or (self.latest.applied if self.latest is not None else None)
        return Telemetry(
            **engine,
            interval_s=interval_s,
            tiers=tuple(
                _tier(n, {**now.levels, **growth}) for n in range(len(self._plan.tier_names))
            ),
            steps=round(growth["steps"][0]),
            applied=applied or Allocation.static(self._plan),
            age_s=0.0,
        )


def _tier(number: int, columns: Mapping[str, tuple[float, ...]]) -> TierTelemetry:
    values: dict[str, Any] = {series.field: columns[series.field][number] for series in TIER_SERIES}
    # A page read while the engine writes it may show one counter of the two a moment older.
    judged, attained = values["attainment_samples"], values.pop(ATTAINED)
    values["attainment"] = min(1.0, attained / judged) if judged > 0 else math.nan
    return TierTelemetry(
        **{field: round(value) if field in _WHOLE else value for field, value in values.items()}
    )


def _fell(before: Mapping[str, tuple[float, ...]], now: Mapping[str, tuple[float, ...]]) -> str:
    """The first counter that fell; empty if none did. They are all of one process."""
    for field, column in now.items():
        if any(new < old * (1 - _ULPS) for new, old in zip(column, before[field], strict=True)):
            return field
    return ""


def _growth(
    before: Mapping[str, tuple[float, ...]], now: Mapping[str, tuple[float, ...]]
) -> dict[str, tuple[float, ...]]:
    return {
        field: tuple(max(0.0, new - old) for new, old in zip(column, before[field], strict=True))
        for field, column in now.items()
    }


def _resets(before: _Figures, now: _Figures, restarted: bool, fell: str) -> tuple[Notice, ...]:
    if restarted:
        counters = "from zero" if fell else "where they were"
        text = (
            f"the engine started again: its time went from {before.time_s:g} s to {now.time_s:g} s;"
            f" counters go on {counters}"
        )
        return (Notice(NoticeKind.RESTARTED, text),)
    if fell:
        text = f"counter {fell} fell although the engine's time went on; counts are from zero"
        return (Notice(NoticeKind.COUNTER_RESET, text),)
    return ()
