"""Writes a loop's audit log: JSON lines in files that rotate, whatever the disk does.

`append` makes the line and hands it over; a thread of the log's own writes, so that neither a full
nor a hung disk costs the loop time. While nothing can be written, entries wait in memory, up to a
bound, and then are counted as lost. It knows nothing of what the entries mean but their kind: see
`agents.audit_entry`.

Each file begins with a start entry, so that it can be read alone; the one of a further file holds
what guard and policy remember, so that a replay can begin there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

from trimtab.agents.audit_entry import DECISION, LOST, lost_entry, text_of
from trimtab.controller.daemon.audit_file import AuditFile, Line

_LOG: Final = logging.getLogger("trimtab.audit")

Head = Callable[[], Mapping[str, object]]
"""Makes the start entry of now, with what guard and policy remember now."""


class Audit(Protocol):
    """Where a loop's entries go; one thread calls it."""

    @property
    def lost(self) -> int:
        """Entries that could not be kept."""

    @property
    def failure(self) -> str:
        """Why nothing can be written now; empty if it can."""

    def begin(self, head: Head) -> None:
        """Begin a run with its start entry; `head` is called again for each further file."""

    def append(self, entry: Mapping[str, object]) -> None:
        """Take one entry; never raises, never waits for the disk."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits; what cannot be written in time is lost."""


class NoAudit:
    """Keeps nothing."""

    lost: int = 0
    failure: str = ""

    def begin(self, head: Head) -> None:
        """Nothing."""

    def append(self, entry: Mapping[str, object]) -> None:
        """Nothing."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Nothing."""


class AuditLog:
    """One engine's audit log in a folder that it may share with other engines' logs."""

    def __init__(
        self,
        folder: Path,
        *,
        engine: str,
        unix_s: Callable[[], float] = time.time,
        most_bytes: int = 64 << 20,
        most_files: int = 16,
        most_waiting: int = 1000,
        retry_s: float = 1.0,
        threaded: bool = True,
    ) -> None:
        """Begin; nothing is written before `begin`.

        Args:
            folder: Where the files go, `ENGINE-NUMBER.jsonl`; made with mode 0700.
            engine: The engine's name.
            unix_s: Now, seconds since 1970.
            most_bytes: A file of so many bytes is followed by the next one.
            most_files: So many files of the engine are kept, at least 1; the oldest go first.
            most_waiting: So many entries wait in memory for the disk.
            retry_s: After a failure the thread tries again so often, seconds.
            threaded: Whether a thread writes; else `append` does, and a failure is tried again at
                the next one.
        """
        self._unix_s = unix_s
        self._most_bytes, self._most_waiting = most_bytes, most_waiting
        self._retry_s = retry_s
        self._run = ""
        self._head: Head | None = None
        self._missing = 0
        self._last: object = 0
        self._begun = self._resume = self._turning = self._faulty = False
        self._file = AuditFile(folder, engine, most_files=most_files, most_bytes=most_bytes)
        self._waiting: deque[Line] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self.lost = 0
        """Entries that could not be kept."""
        self.failure = ""
        """Why nothing can be written now; empty if it can."""
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(
                target=self._work, name=f"trimtab-audit-{engine}", daemon=True
            )
            self._thread.start()

    @property
    def waiting(self) -> int:
        """Entries in memory that are not written yet."""
        return len(self._waiting)

    def begin(self, head: Head) -> None:
        """Begin a run with its start entry.

        Args:
            head: Makes the start entry. It is called now, and after a decision whenever a further
                file begins or entries were lost, in the caller's thread.
        """
        self._run = f"{os.getpid()}-{round(self._unix_s() * 1e3):x}"
        self._head, self._begun, self._last = head, False, 0
        self._put_head()

    def append(self, entry: Mapping[str, object]) -> None:
        """Take one entry; never raises, never waits for the disk.

        Args:
            entry: Of `agents.audit_entry`, in the order in which the guard was called.
        """
        if self._thread is None:
            self._write_waiting()
        if self._missing and len(self._waiting) < self._most_waiting:
            reason = self.failure or "the disk was too slow"
            gap = lost_entry(unix_s=self._unix_s(), entries=self._missing, reason=reason)
            if self._put(Line(_line(gap))):
                self._missing, self._resume = 0, True
        kept = self._put_entry(entry)
        kind = entry.get("kind")
        self._resume = self._resume or kind == LOST
        # Only after a decision do the entries say all that guard and policy remember.
        if kept and kind == DECISION:
            self._last = entry.get("number")
            full = self._file.size >= self._most_bytes and not self._turning
            if full or self._resume or self._file.headless:
                self._put_head(new_file=full)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits and end the thread; what cannot be written in time is lost."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._thread is None or not self._thread.is_alive():
            self._write_waiting()
            self._file.close()
        self.lost += len(self._waiting)

    def _put_head(self, *, new_file: bool = False) -> None:
        if self._head is None:
            return
        try:
            entry = {**self._head(), "run": self._run, "after": self._last}
            if not self._begun:
                entry["memory"] = {}
            elif not entry.get("memory"):
                entry["memory"] = None
            known = entry["memory"] is not None
            if not known and not new_file:
                # Nothing can be said now that the file does not say already.
                self._resume = True
                return
            text, bare = _line(entry), _line({**entry, "memory": None})
        except Exception:
            # Whatever is wrong with it, a loop must not end by its log.
            if not self._faulty:
                _LOG.exception("audit log: no start entry can be made")
            self._faulty = True
            return
        self._begun = True
        # Before the line is out of sight: its writer is another thread.
        self._turning = self._turning or new_file
        self._resume, self._file.headless = not known, False
        if not self._put(Line(text, bare=bare, new_file=new_file)):
            self._resume, self._turning = True, False

    def _put_entry(self, entry: Mapping[str, object]) -> bool:
        """Hand an entry over; whether it is kept."""
        try:
            kept = self._put(Line(_line(entry)))
        except (TypeError, ValueError):
            _LOG.exception("audit log: an entry of kind %s has no JSON form", entry.get("kind"))
            kept = False
        if not kept:
            self._missing += 1
            self.lost += 1
        return kept

    def _put(self, line: Line) -> bool:
        """Hand a line over to the writer; whether there was room for it."""
        with self._changed:
            # A start entry takes one place more: without it what follows cannot be read.
            if len(self._waiting) >= self._most_waiting + bool(line.bare):
                return False
            self._waiting.append(line)
            self._changed.notify()
        if self._thread is None:
            self._write_waiting()
        return True

    def _work(self) -> None:
        while not self._closing:
            healthy = self._write_waiting()
            with self._changed:
                if healthy:
                    self._changed.wait_for(lambda: self._waiting or self._closing)
                elif not self._closing:
                    self._changed.wait(self._retry_s)

    def _write_waiting(self) -> bool:
        """Write until nothing waits or the disk refuses; whether it took everything."""
        while self._waiting:
            line = self._waiting[0]
            try:
                self._file.write(line)
            except Exception as error:
                # Whatever it is, the writer must go on: what waits is tried again.
                self._failed(error)
                return False
            self._waiting.popleft()
            if line.new_file:
                # Only then is it written here: what the loop's thread says meanwhile stays.
                self._turning = False
            if self.failure:
                _LOG.warning("audit log %s: written again", self._file.place)
                self.failure = ""
        return True

    def _failed(self, error: Exception) -> None:
        words = error.strerror if isinstance(error, OSError) else None
        fault = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        failure = f"{self._file.place}: {words or fault}"
        if not self.failure:
            _LOG.warning(
                "audit log %s; up to %d entries wait in memory", failure, self._most_waiting
            )
        self.failure = failure


def _line(entry: Mapping[str, object]) -> bytes:
    return text_of(entry).encode() + b"\n"
