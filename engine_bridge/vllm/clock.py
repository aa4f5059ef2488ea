"""The scheduler's time: the wall's, or a test's.

It is injected so that nothing else reads a clock.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the scheduler's time comes from."""

    def now_s(self) -> float:
        """Seconds that never go back."""

    def arrived_s(self, arrival_time: float) -> float:
        """VLLM's arrival time of a request, on this clock and not after now."""

    def speed(self, model_ms: float, start_s: float, end_s: float) -> float:
        """How many times as long as the model says a step took between two times."""


class WallClock:
    """Real time; the monotonic clock, so that a changed wall clock moves nothing."""

    def now_s(self) -> float:
        """Seconds since some start."""
        return time.monotonic()

    def arrived_s(self, arrival_time: float) -> float:
        """Arrival by the monotonic clock: as long ago as the wall clock says, at least 0."""
        return time.monotonic() - max(0.0, time.time() - arrival_time)

    def speed(self, model_ms: float, start_s: float, end_s: float) -> float:
        """Measured over expected."""
        return (end_s - start_s) * 1e3 / model_ms
