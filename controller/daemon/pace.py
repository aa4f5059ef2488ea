"""When a loop ticks: on a grid, late once rather than often in a row.

It waits and counts; what a tick does is `loop`'s business.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

LATE_FRACTION: Final = 0.5
"""A tick that begins later than this part of an interval counts as late."""


def awake_clock_s() -> float:
    """Seconds that never go back and go on while the machine is suspended, as leases elsewhere do.

    Where the system has no such clock, Python's monotonic one, which stands still in a suspend.
    """
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Pace:
    """The grid of one loop's ticks: `start + k x interval`.

    A process that was stopped, or a tick that took too long, leaves ticks out: the grid stays, and
    nothing is made up for.
    """

    def __init__(
        self,
        interval_s: float,
        *,
        monotonic_s: Callable[[], float],
        wait: Callable[[float], object],
        phase_s: float = 0.0,
    ) -> None:
        """Lay the grid; the first tick is due after the phase.

        Args:
            interval_s: Time between two ticks, seconds.
            monotonic_s: Seconds that never go back.
            wait: Waits for so many seconds, or less where the loop is to end.
            phase_s: Time to the first tick, seconds, so that many loops do not tick at once.
        """
        self._interval_s = interval_s
        self._monotonic_s = monotonic_s
        self._wait = wait
        self._due_s = monotonic_s() + phase_s
        self.late = 0
        """Ticks that began more than half an interval late, or were left out."""

    def wait_for_tick(self) -> None:
        """Wait until the next tick is due; return at once if it is already."""
        now_s = self._monotonic_s()
        behind = math.floor((now_s - self._due_s) / self._interval_s)
        if behind > 0:
            # The newest one that is due stands for all that were missed.
            self._due_s += behind * self._interval_s
            self.late += behind
        if now_s < self._due_s:
            self._wait(self._due_s - now_s)
            now_s = self._monotonic_s()
        if now_s - self._due_s > LATE_FRACTION * self._interval_s:
            self.late += 1
        self._due_s += self._interval_s
