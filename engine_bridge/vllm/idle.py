"""Ends telemetry intervals while the engine has nothing to do.

vLLM's core then sleeps until a request comes, and no step ends an interval: an engine at rest could
not be told from one that is stuck. A thread ends them instead, and never runs beside the scheduler.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

_LOG: Final = logging.getLogger("trimtab.idle")
_OVERDUE_S: Final = 0.05


class IdleIntervals:
    """Calls back at the end of each interval, as long as the scheduler says that it rests."""

    def __init__(
        self,
        end_interval: Callable[[float], None],
        *,
        closes_s: Callable[[], float],
        now_s: Callable[[], float],
    ) -> None:
        """Prepare; `start` begins.

        Args:
            end_interval: Ends the interval at a time, seconds of `now_s`.
            closes_s: When the interval is due to end.
            now_s: The scheduler's time, in real time.
        """
        self._end_interval, self._closes_s, self._now_s = end_interval, closes_s, now_s
        self._turn = threading.Condition()
        self._resting = self._closed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, at rest."""
        self._resting = True
        self._thread = threading.Thread(target=self._work, name="trimtab-idle", daemon=True)
        self._thread.start()

    def rest(self) -> None:
        """The scheduler does nothing from now on, until `wake`."""
        # No lock: only the scheduler's thread writes it, and the other one looks at each interval.
        self._resting = self._thread is not None

    def wake(self) -> None:
        """The scheduler goes on; waits for an interval that is just being ended."""
        if self._resting:
            with self._turn:
                self._resting = False

    def close(self) -> None:
        """End the thread."""
        with self._turn:
            self._closed, self._resting = True, False
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._thread = None

    def _work(self) -> None:
        while True:
            with self._turn:
                # A step that is under way ends an interval that is overdue.
                left_s = self._closes_s() - self._now_s()
                pause_s = left_s if left_s > 0 or self._resting else _OVERDUE_S
                if self._turn.wait_for(lambda: self._closed, timeout=max(0.0, pause_s)):
                    return
                if self._resting and self._now_s() >= self._closes_s():
                    self._end()

    def _end(self) -> None:
        try:
            self._end_interval(self._now_s())
        except Exception:
            # Telemetry must not cost the engine anything, least of all its scheduler's turn.
            _LOG.exception("an idle interval could not be ended")
            self._resting = False
