"""Sees that a tier has become slow: its P99 TTFT far above what it was in the last hour.

Pure: telemetry and a clock come in, a finding comes out. What is done about it is
`profile_watch`'s business. The alert `TrimtabTierSlow` (deploy/prometheus) is the same idea on
Prometheus' side; this one works without Prometheus.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry

BASELINE_S: Final = 3600.0
"""Length of the baseline, seconds."""
EXCLUDED_S: Final = 300.0
"""What the baseline leaves out of the present, seconds: a slow-down must not be its own measure."""
LEAST_MINUTES: Final = 10
"""Minutes with data that a baseline needs."""
LEAST_INTERVALS: Final = 5
"""Intervals in a row that must be slow, however long they last."""
SMOOTHED_S: Final = 10.0
"""The present is the median of the intervals' P99s over this long, seconds."""
_MINUTE_S: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class Slowdown:
    """A tier that has become slow."""

    tier: str
    p99_ms: float
    """P99 TTFT now; the oldest wait where no request gets its first token at all, milliseconds."""
    baseline_ms: float
    """What it was, milliseconds."""
    for_s: float
    """How long it has been slow, seconds."""


class SlowdownDetector:
    """Watches the tiers of one engine; a finding is told once, until the tier is quick again."""

    def __init__(self, tier_names: Sequence[str], *, factor: float, for_s: float) -> None:
        """Start without a baseline.

        Args:
            tier_names: The plan's tiers, in its order.
            factor: How many times the baseline is slow, above 1.
            for_s: How long it must be slow, seconds.
        """
        self._tiers = [_TierWatch(name, factor, for_s) for name in tier_names]
        self._told_s = math.nan

    def see(self, telemetry: Telemetry, now_s: float) -> Slowdown | None:
        """Take an interval in; the same one again says nothing new.

        Args:
            telemetry: The newest interval.
            now_s: Seconds of a clock that never goes back.

        Returns:
            The first tier that has just been slow for long enough, in the plan's order.
        """
        if telemetry.time_s == self._told_s:
            return None
        self._told_s = telemetry.time_s
        found = [
            watch.see(tier, now_s) for watch, tier in zip(self._tiers, telemetry.tiers, strict=True)
        ]
        return next((slowdown for slowdown in found if slowdown is not None), None)


class _TierWatch:
    """One tier's present and baseline."""

    def __init__(self, name: str, factor: float, for_s: float) -> None:
        self._name, self._factor, self._for_s = name, factor, for_s
        self._present: deque[tuple[float, float]] = deque()
        self._minute = -1
        self._of_minute: list[float] = []
        self._minutes: deque[tuple[int, float]] = deque()
        self._baseline_ms = math.nan
        self._slow_since_s = math.nan
        self._last_s = -math.inf
        self._slow_intervals = 0
        self._told = False

    def see(self, tier: TierTelemetry, now_s: float) -> Slowdown | None:
        self._turn_minute(int(now_s // _MINUTE_S))
        if math.isfinite(tier.ttft_ms_p99):
            self._of_minute.append(tier.ttft_ms_p99)
            self._present.append((now_s, tier.ttft_ms_p99))
        while self._present and self._present[0][0] <= now_s - SMOOTHED_S:
            self._present.popleft()
        level_ms = self._level_ms(tier)
        if now_s - self._last_s > self._for_s:
            # Nobody looked for so long that nothing can be said of the time between.
            self._calm()
        self._last_s = now_s
        if not level_ms > self._factor * self._baseline_ms:
            self._calm()
            return None
        return self._slow(level_ms, now_s)

    def _level_ms(self, tier: TierTelemetry) -> float:
        if self._present:
            return median(value for _, value in self._present)
        # Where nobody gets a first token, whoever waits has a TTFT of at least the wait.
        return tier.oldest_wait_s * 1e3 if tier.queue_length else math.nan

    def _slow(self, level_ms: float, now_s: float) -> Slowdown | None:
        if math.isnan(self._slow_since_s):
            self._slow_since_s = now_s
        self._slow_intervals += 1
        slow_s = now_s - self._slow_since_s
        if self._told or slow_s < self._for_s or self._slow_intervals < LEAST_INTERVALS:
            return None
        self._told = True
        return Slowdown(
            tier=self._name, p99_ms=level_ms, baseline_ms=self._baseline_ms, for_s=slow_s
        )

    def _calm(self) -> None:
        self._slow_since_s, self._slow_intervals, self._told = math.nan, 0, False

    def _turn_minute(self, minute: int) -> None:
        # The median of the minutes' medians: a few bad minutes in the hour do not raise it.
        if minute == self._minute:
            return
        if self._of_minute:
            self._minutes.append((self._minute, median(self._of_minute)))
            self._of_minute = []
        self._minute = minute
        newest = minute - int(EXCLUDED_S // _MINUTE_S)
        oldest = newest - int(BASELINE_S // _MINUTE_S)
        while self._minutes and self._minutes[0][0] < oldest:
            self._minutes.popleft()
        known = [value for at, value in self._minutes if at < newest]
        self._baseline_ms = median(known) if len(known) >= LEAST_MINUTES else math.nan
