"""The files of an audit log: numbered, locked, private, each line whole or not there at all.

It writes when it is told to and raises what the disk says; patience is `audit_log`'s business.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

_TAIL_BYTES: Final = 1 << 20
"""More than any line: what has no line's end in so much is no file of ours."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its end, and where it has to go."""

    text: bytes
    bare: bytes = b""
    """Of a start entry: the same without what guard and policy remember; empty for all others."""
    new_file: bool = False
    """Whether a further file begins with it."""


class AuditFile:
    """The file that is written now, of the many that one engine's log has.

    Files are numbered and not named by time, as clocks jump. A lock tells two processes apart that
    write the same engine's log: each has files of its own.
    """

    def __init__(self, folder: Path, engine: str, *, most_files: int, most_bytes: int) -> None:
        """Begin without a file; the first `write` opens or makes one.

        Args:
            folder: Where; made with mode 0700 if need be.
            engine: The engine's name, part of the files' names.
            most_files: So many are kept, the newest.
            most_bytes: A file of an earlier process is gone on with up to this size.
        """
        self._folder = folder
        self._stem = quote(engine, safe="")
        self._most_files, self._most_bytes = max(1, most_files), most_bytes
        self._path: Path | None = None
        self._handle = -1
        self._bare = b""
        self._broken = False
        self.size = 0
        """Bytes in the file."""
        self.headless = False
        """Whether the file had to begin without what guard and policy remember."""

    @property
    def place(self) -> str:
        """The file, or the folder while there is none."""
        return str(self._path or self._folder)

    def write(self, line: Line) -> None:
        """Write one line, wholly or not at all.

        Raises:
            OSError: it could not be written, and nothing of it is in the file.
        """
        if line.bare:
            self._bare = line.bare
        text = line.text
        if self._path is None and not line.new_file:
            self._open_newest()
        elif self._is_gone() or (line.new_file and self.size > 0):
            # An empty one is the further file already: the disk refused its first line.
            self.close()
        if self._handle < 0:
            self._open_next()
        if self.size == 0 and not line.bare:
            text = self._bare + text
            self.headless = True
        self._append(text)

    def close(self) -> None:
        """Close the file; the next `write` makes a further one."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self.size, self._broken = -1, 0, False

    def _append(self, text: bytes) -> None:
        if self._broken:
            self._cut()
        written = 0
        try:
            written = os.write(self._handle, text)
            if written < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            if written:
                self._broken = True
                self._cut()
            raise
        self.size += written

    def _cut(self) -> None:
        """Take back half a line; until that works nothing more is written."""
        os.ftruncate(self._handle, self.size)
        self._broken = False

    def _is_gone(self) -> bool:
        """Whether the file was deleted or moved away from under us."""
        if self._handle < 0 or self._path is None:
            return True
        own = os.fstat(self._handle)
        try:
            there = os.stat(self._path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            # Out of sight, as after a change of permissions, is not gone.
            return False
        return (own.st_ino, own.st_dev) != (there.st_ino, there.st_dev)

    def _open_newest(self) -> None:
        """Go on with the newest file of an earlier process, if it has room and nobody writes it."""
        numbers = self._numbers()
        if not numbers:
            return
        path = self._name(numbers[-1])
        try:
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(handle).st_size
            tail = os.pread(handle, _TAIL_BYTES, max(size - _TAIL_BYTES, 0))
            whole = tail.rfind(b"\n") + 1
            if size >= self._most_bytes or not whole:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            if whole < len(tail):
                os.ftruncate(handle, size - len(tail) + whole)
        except OSError:
            os.close(handle)
            return
        self._path, self._handle, self.size = path, handle, size - len(tail) + whole

    def _open_next(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        numbers = self._numbers()
        number = numbers[-1] + 1 if numbers else 1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            try:
                self._handle = os.open(self._name(number), flags, 0o600)
                break
            except FileExistsError:
                # Another process was quicker.
                number += 1
        self._path = self._name(number)
        with contextlib.suppress(OSError):
            # Some network file systems lock nothing; the name is ours alone all the same.
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for old in numbers[: max(0, len(numbers) + 1 - self._most_files)]:
            with contextlib.suppress(OSError):
                self._name(old).unlink()

    def _numbers(self) -> list[int]:
        """Numbers of the engine's files, ascending; none where there is no folder."""
        ours = re.compile(rf"{re.escape(self._stem)}-(\d{{8,}})\.jsonl")
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return []
        return sorted(int(found[1]) for name in names if (found := ours.fullmatch(name)))

    def _name(self, number: int) -> Path:
        return self._folder / f"{self._stem}-{number:08d}.jsonl"
