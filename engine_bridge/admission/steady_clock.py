"""A clock that is never set back: what is counted against time must not be counted twice."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.engine_bridge.admission.limiter import MICROS


class SteadyClock:
    """A time that never goes back, whatever the clock behind it does.

    Time that the clock behind takes back is lost, not repeated: it goes on from where it was.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        """Start with a clock that gives seconds."""
        self._clock_s = clock_s
        self._latest_us = round(clock_s() * MICROS)
        self._ahead_us = 0

    def now_s(self) -> float:
        """The time, seconds."""
        return self.now_us() / MICROS

    def now_us(self) -> int:
        """The time, whole microseconds."""
        now_us = round(self._clock_s() * MICROS) + self._ahead_us
        if now_us < self._latest_us:
            self._ahead_us += self._latest_us - now_us
            now_us = self._latest_us
        self._latest_us = now_us
        return now_us
