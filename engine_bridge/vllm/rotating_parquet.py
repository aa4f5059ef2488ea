"""Writes buffers of rows to Parquet files that rotate, in a thread of its own.

One buffer is one file, written beside its place and renamed, so that a reader never sees half of
one. A slow or full disk costs whole buffers, which are counted, never the caller's time. It knows
no columns: the logs that use it (`step_log`, `traffic_log`) make the tables.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from trimtab.engine_bridge.errors import InputError

_LOG: Final = logging.getLogger("trimtab.logs")
_WAITING_BUFFERS: Final = 4
_ABANDONED_S: Final = 3600.0


class LogFolderError(InputError):
    """A log's folder cannot be written to."""


class Buffer(Protocol):
    """Rows that become one file."""

    def __len__(self) -> int:
        """Number of rows."""

    def table(self) -> pa.Table:
        """The rows as a table, with the file's metadata; called in the writer's thread."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a log may keep; the oldest files go first."""

    most_files: int = 256
    """Most files of the log in its folder, at least 1."""
    most_bytes: int = 1 << 30
    """Most bytes of them together; the newest file stays in any case."""


def write_parquet(table: pa.Table, path: Path) -> None:
    """Write a table as one file."""
    pq.write_table(table, path, compression="zstd")


class RotatingParquet:
    """Hands buffers to one background thread that writes, renames and deletes.

    `put` is for one caller at a time; `close` may be called by any thread, once `put` is not called
    any more.
    """

    def __init__(
        self,
        folder: Path,
        prefix: str,
        *,
        limits: Limits | None = None,
        write: Callable[[pa.Table, Path], None] = write_parquet,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Make the folder if need be and start the thread.

        Args:
            folder: Where the files go; it is made readable by this user alone.
            prefix: First part of the files' names, for instance `steps`.
            limits: How much may be kept.
            write: Writes one table to one path; OSError and Arrow's errors mean a lost buffer.
            wall_s: Seconds since 1970, for names of files and to tell abandoned ones.

        Raises:
            LogFolderError: the folder cannot be made or written to.
        """
        self._folder, self._prefix = folder, prefix
        self._limits = limits or Limits()
        self._write, self._wall_s = write, wall_s
        self._queue: queue.Queue[Buffer | None] = queue.Queue(_WAITING_BUFFERS)
        self._files = 0
        self._healthy = True
        self.dropped_rows = 0
        """Rows lost since the start, because the disk was slow or full."""
        self.written_rows = 0
        """Rows in files since the start, deleted ones included."""
        self._prepare()
        self._thread = threading.Thread(
            target=self._work, name=f"trimtab-{prefix}-log", daemon=True
        )
        self._thread.start()

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._folder

    def put(self, buffer: Buffer) -> bool:
        """Have a buffer written, or drop it if the writer is behind; never waits."""
        if not len(buffer):
            return True
        try:
            self._queue.put_nowait(buffer)
        except queue.Full:
            self._lost(len(buffer), "the disk is too slow")
            return False
        return True

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what waits and end the thread; after the time-out what waits is lost."""
        if not self._thread.is_alive():
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _prepare(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for part in self._folder.glob(f".{self._prefix}-*.part"):
                if self._wall_s() - part.stat().st_mtime > _ABANDONED_S:
                    part.unlink(missing_ok=True)
            probe = self._folder / f".{self._prefix}-{os.getpid()}.probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise LogFolderError(
                f"{self._folder}: cannot be written: {error.strerror or error}",
                remedy="choose another folder or mend its permissions",
            ) from error

    def _work(self) -> None:
        while (buffer := self._queue.get()) is not None:
            try:
                self._store(buffer)
                self._delete_oldest()
            except (OSError, pa.ArrowException) as error:
                self._lost(len(buffer), " ".join(str(error).split())[:160])
            except Exception:
                # A fault in one table must not end the log, nor the engine.
                _LOG.exception("%s log: %d rows are lost", self._prefix, len(buffer))
                self.dropped_rows += len(buffer)

    def _store(self, buffer: Buffer) -> None:
        name = self._free_name()
        part = self._folder / f".{name}.part"
        try:
            part.touch(mode=0o600)
            self._write(buffer.table(), part)
            part.replace(self._folder / name)
        finally:
            part.unlink(missing_ok=True)
        self._files += 1
        self.written_rows += len(buffer)
        self._healthy = True

    def _free_name(self) -> str:
        """A name that sorts by age; a restart may have the process number of its predecessor."""
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(self._wall_s()))
        while True:
            name = f"{self._prefix}-{stamp}-{os.getpid()}-{self._files:06d}.parquet"
            if not (self._folder / name).exists():
                return name
            self._files += 1

    def _delete_oldest(self) -> None:
        found: list[tuple[str, int, Path]] = []
        for path in self._folder.glob(f"{self._prefix}-*.parquet"):
            try:
                found.append((path.name, path.stat().st_size, path))
            except FileNotFoundError:
                continue  # Another engine's log in the same folder deletes, too.
        found.sort()
        total = sum(size for _, size, _ in found)
        while len(found) > 1 and (
            len(found) > self._limits.most_files or total > self._limits.most_bytes
        ):
            _, size, path = found.pop(0)
            path.unlink(missing_ok=True)
            total -= size

    def _lost(self, rows: int, why: str) -> None:
        self.dropped_rows += rows
        if self._healthy:
            _LOG.warning(
                "%s log in %s loses rows: %s; it goes on by itself once it can write again",
                self._prefix, self._folder, why,
            )  # fmt: skip
        self._healthy = False


def json_metadata(key: bytes, facts: dict[str, Any]) -> dict[bytes, bytes]:
    """A file's metadata: one key with facts as JSON."""
    return {key: json.dumps(facts, sort_keys=True).encode()}
