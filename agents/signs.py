"""Signs that the guard reads beside the promises: old data, novel observations, a deaf engine.

Each remembers a few intervals and decides nothing.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import fields

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.telemetry import Telemetry


class Freshness:
    """How old telemetry is, in control intervals; the same telemetry again grows older."""

    def __init__(self, interval_s: float) -> None:
        """Begin.

        Args:
            interval_s: The control interval, seconds.
        """
        self._interval_s = interval_s
        self._time_s = -math.inf
        self._first_age = 0.0
        self._repeats = 0
        self.restarted = False
        """Whether the last telemetry is from before the one before it: a new run."""
        self.new = True
        """Whether the last telemetry told of a time not told of before."""

    def see(self, telemetry: Telemetry) -> float:
        """The age in control intervals; infinite where it is no number."""
        time_s, age_s = telemetry.time_s, telemetry.age_s
        if not math.isfinite(time_s) or not math.isfinite(age_s) or age_s < 0:
            self.restarted = self.new = False
            return math.inf
        self.restarted = time_s < self._time_s
        self.new = time_s != self._time_s
        age = age_s / self._interval_s
        if self.new:
            self._time_s, self._first_age, self._repeats = time_s, age, 0
        else:
            self._repeats += 1
        # Who tells the same again may count its age on, or may not know that it grows.
        return max(age, self._first_age + self._repeats)


class Novelty:
    """Whether a policy sees what it was not trained on: k of the last n, until none is."""

    def __init__(self, *, fraction: float, intervals: int, window: int) -> None:
        """Begin without anything novel.

        Args:
            fraction: An observation with more than this part outside is novel.
            intervals: So many novel ones begin it.
            window: Observations that are looked back on.
        """
        self._fraction = fraction
        self._intervals = intervals
        self._novel: deque[bool] = deque(maxlen=window)
        self._outside = False

    def see(self, outside_fraction: float) -> bool:
        """Take in one observation; whether the policy is out of its envelope."""
        self._novel.append(not outside_fraction <= self._fraction)
        count = sum(self._novel)
        self._outside = count >= self._intervals or (self._outside and count > 0)
        return self._outside


class Actuation:
    """Whether the engine keeps to what it was asked for."""

    def __init__(self, *, intervals: int, tolerance: float, interval_s: float) -> None:
        """Begin.

        Args:
            intervals: So many mismatches in a row count.
            tolerance: Relative difference that is none.
            interval_s: The control interval, seconds.
        """
        self._intervals = intervals
        self._tolerance = tolerance
        self._fresh_s = interval_s / 2
        self._wrong = 0

    def see(self, asked: Allocation | None, telemetry: Telemetry) -> bool:
        """Take in one interval; whether the engine is deaf."""
        # Older data may tell of the time before the last request.
        known = telemetry.read_back or telemetry.age_s <= self._fresh_s
        if asked is None or not known:
            return self._wrong >= self._intervals
        same = agree(asked, telemetry.applied, self._tolerance)
        self._wrong = 0 if same else self._wrong + 1
        return self._wrong >= self._intervals


def agree(one: Allocation, other: Allocation, tolerance: float) -> bool:
    """Whether two allocations are the same but for their version and a relative tolerance."""
    return all(
        _close(getattr(one, field.name), getattr(other, field.name), tolerance)
        for field in fields(Allocation)
        if field.name != "version"
    )


def _close(one: object, other: object, tolerance: float) -> bool:
    if one == other:
        return True
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_close, one, other, [tolerance] * len(one)))
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
    return False
