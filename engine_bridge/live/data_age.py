"""How old an engine's figures are, by clocks that do not jump.

The age counts on our own monotonic clock from when an interval was seen first. The wall clocks of
two machines only add what the figures had waited by then, and only where that is plausible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from trimtab.engine_bridge.live.background import Seen
from trimtab.engine_bridge.live.reading import Notice, NoticeKind
from trimtab.engine_bridge.live.series import REPORTED_UNIX_S

_PLAUSIBLE_INTERVALS: Final = 2.0


class DataAge:
    """Of one engine's last interval."""

    def __init__(self, interval_s: float, unix_s: Callable[[], float]) -> None:
        """Begin without any figures.

        Args:
            interval_s: The control interval, seconds.
            unix_s: Seconds since 1970.
        """
        self._interval_s, self._unix_s = interval_s, unix_s
        self._true_at_s = -math.inf
        self._skewed = False

    def at(self, monotonic_s: float) -> float:
        """The age at a time of the monotonic clock, seconds; infinite without any figures."""
        return max(0.0, monotonic_s - self._true_at_s)

    def first_seen(self, seen: Seen) -> list[Notice]:
        """Figures of a new interval have come; a notice if the wall clocks have come apart."""
        delay_s = max(0.0, seen.snapshot.delay_s)
        self._true_at_s = seen.at_s - delay_s
        reported = seen.snapshot.values.get(REPORTED_UNIX_S, {}).get("", math.nan)
        if not (math.isfinite(reported) and reported > 0):
            return []
        waited_s = self._unix_s() - reported
        plausible = (
            -self._interval_s < waited_s <= delay_s + _PLAUSIBLE_INTERVALS * self._interval_s
        )
        if plausible:
            # The source's delay is part of it.
            self._true_at_s = seen.at_s - max(delay_s, waited_s)
        known, self._skewed = self._skewed, not plausible
        if plausible or known:
            return []
        text = f"the engine's wall clock says {waited_s:.1f} s of age; only our own clock counts"
        return [Notice(NoticeKind.CLOCK_SKEW, text)]
