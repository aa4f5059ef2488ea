"""Reading a source so that one that hangs costs its caller no more than a deadline.

It tries nothing twice and judges no figures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trimtab.engine_bridge.live.snapshot import (
    MetricSource,
    Snapshot,
    TelemetryUnavailableError,
    Unavailable,
)


@dataclass(frozen=True)
class Seen:
    """A snapshot, and when it was asked for: its figures are no older than that."""

    snapshot: Snapshot
    at_s: float
    """Monotonic seconds."""


class Reader(Protocol):
    """Reads one source, one read at a time: `begin`, then `end`."""

    @property
    def place(self) -> str:
        """Where, for people."""

    def begin(self) -> None:
        """Start a read; one that is still under way goes on instead."""

    def end(self, deadline_s: float) -> Seen:
        """What has been read; waits for it until so many seconds after `begin`.

        Raises:
            TelemetryUnavailableError: nothing has come, or the source has nothing.
        """

    def close(self) -> None:
        """Read no more."""


class InlineReader:
    """Reads in the caller's thread: for virtual time, and sources that cannot hang."""

    def __init__(self, source: MetricSource, monotonic_s: Callable[[], float]) -> None:
        """Take the source over."""
        self._source, self._monotonic_s = source, monotonic_s

    @property
    def place(self) -> str:
        """Where, for people."""
        return self._source.place

    def begin(self) -> None:
        """Nothing: all of it is done in `end`."""

    def end(self, deadline_s: float) -> Seen:
        """Read now; the deadline is the source's own."""
        asked_s = self._monotonic_s()
        return Seen(self._source.read(), asked_s)

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class BackgroundReader:
    """Reads in a thread of its own, which ends with the process and never holds it up."""

    def __init__(self, source: MetricSource, monotonic_s: Callable[[], float]) -> None:
        """Take the source over; the thread starts with the first read."""
        self._source, self._monotonic_s = source, monotonic_s
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None
        self._reading = self._closed = False
        self._late: Seen | None = None
        self._found: Seen | TelemetryUnavailableError | None = None
        self._began_s = 0.0

    @property
    def place(self) -> str:
        """Where, for people."""
        return self._source.place

    def begin(self) -> None:
        """Start a read; one that is still under way goes on instead."""
        with self._turn:
            self._began_s = self._monotonic_s()
            if self._reading:
                return
            # What came after its deadline is better than nothing, if nothing newer comes.
            self._late = self._found if isinstance(self._found, Seen) else None
            self._found = None
            self._reading = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="trimtab-metrics", daemon=True
                )
                self._thread.start()
            self._turn.notify_all()

    def end(self, deadline_s: float) -> Seen:
        """What has been read; waits for it until so many seconds after `begin`."""
        with self._turn:
            left_s = self._began_s + deadline_s - self._monotonic_s()
            self._turn.wait_for(lambda: not self._reading, timeout=max(0.0, left_s))
            found, late = self._found, self._late
            self._late = None
            if not self._reading:
                self._found = None
        if isinstance(found, Seen):
            return found
        if late is not None:
            return late
        if found is None:
            text = f"{self.place}: no figures within {deadline_s:g} s"
            raise TelemetryUnavailableError(Unavailable.TIMEOUT, text)
        raise found

    def close(self) -> None:
        """Read no more; a read that hangs is left to itself."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
            if self._thread is None:
                self._source.close()

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._reading or self._closed)
                if self._closed:
                    break
            found = self._read()
            with self._turn:
                self._found, self._reading = found, False
                self._turn.notify_all()
        self._source.close()

    def _read(self) -> Seen | TelemetryUnavailableError:
        asked_s = self._monotonic_s()
        try:
            return Seen(self._source.read(), asked_s)
        except TelemetryUnavailableError as error:
            return error
        except Exception as error:
            # A fault of the adapter must not end the thread, or nothing would ever come again.
            text = f"{self.place}: {type(error).__name__}: {error}"
            return TelemetryUnavailableError(Unavailable.MALFORMED, text)
