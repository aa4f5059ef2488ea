"""Reads audit logs: files of one or more engines and daemon starts, as runs of entries.

Files may be large: a first pass finds where runs begin, entries are then read one by one. What an
entry means is `audit_entry`'s business.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trimtab.agents.audit_entry import KINDS, START, AuditError
from trimtab.engine_bridge.errors import did_you_mean

_FILE: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{8,})\.jsonl")
_STARTS: Final = b'{"kind":"start"'

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A stretch of a file that begins with a start entry."""

    path: Path
    line: int
    """Number of its first line in the file, from 1."""
    begin: int
    """Offset of its first byte."""
    end: int
    """Offset behind its last whole line."""
    start: Entry
    """Its start entry."""
    torn: bool
    """Whether half a line follows: the process was killed in the middle of it."""

    def entries(self, *, last: int | None = None) -> Iterator[tuple[str, Entry]]:
        """Where and what, line by line, the start entry first.

        Args:
            last: Only so many, the newest; None for all.

        Raises:
            AuditError: a line is no entry; names it.
        """
        for number, text in deque(self._lines(), maxlen=last) if last else self._lines():
            where = f"{self.path} line {number}"
            yield where, _entry(text, where)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            offset, number = self.begin, self.line
            while offset < self.end and (text := file.readline()):
                yield number, text
                offset, number = offset + len(text), number + 1


@dataclass(kw_only=True)
class AuditTail:
    """What is written to a file from some offset on."""

    path: Path
    offset: int = 0
    """Behind the last whole line that was read, bytes."""

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Where and what of the whole lines that were written since the last call.

        Raises:
            AuditError: a line is no entry; names it.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                lines = file.readlines()
        except FileNotFoundError:
            return  # The oldest files are deleted.
        for text in lines:
            if not text.endswith(b"\n"):
                return
            where = f"{self.path} byte {self.offset}"
            self.offset += len(text)
            yield where, _entry(text, where)


@dataclass(kw_only=True)
class AuditRun:
    """What one daemon wrote of one engine from its start on, as far as it is still there."""

    engine: str
    """The engine's name."""
    run: str
    """Tells the starts of a daemon apart."""
    parts: list[Part] = field(default_factory=list)
    """In the order in which they were written."""

    @property
    def start(self) -> Entry:
        """The first start entry that is still there."""
        return self.parts[0].start

    @property
    def torn(self) -> tuple[str, ...]:
        """Files that end with half a line."""
        return tuple(str(part.path) for part in self.parts if part.torn)

    def entries(self) -> Iterator[tuple[str, Entry]]:
        """Where and what, in the order of writing.

        Raises:
            AuditError: a line is no entry; names it.
        """
        for part in self.parts:
            yield from part.entries()


def read_audit(paths: Sequence[Path], *, engine: str | None = None) -> list[AuditRun]:
    """The runs in files and folders, each engine's in the order of writing.

    Args:
        paths: Audit files, or folders of them.
        engine: Only this engine's; None for all.

    Raises:
        AuditError: there is no such file, none in a folder, or one that is no audit log.
    """
    runs: dict[tuple[str, str], AuditRun] = {}
    for path in audit_files(paths):
        for part in _parts(path):
            key = str(part.start.get("engine")), str(part.start.get("run"))
            runs.setdefault(key, AuditRun(engine=key[0], run=key[1])).parts.append(part)
    if engine is None:
        return list(runs.values())
    known = sorted({run.engine for run in runs.values()})
    if runs and engine not in known:
        raise AuditError(
            "--engine",
            value=engine,
            bound=f"one of {', '.join(known)}",
            remedy=did_you_mean(engine, known),
        )
    return [run for run in runs.values() if run.engine == engine]


def audit_files(paths: Sequence[Path]) -> list[Path]:
    """The audit files that paths name: each engine's in the order of writing.

    Raises:
        AuditError: there is no such file, or none in a folder.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [inner for inner in path.iterdir() if _FILE.fullmatch(inner.name)]
            if not inside:
                raise AuditError(
                    str(path),
                    value="no audit files",
                    bound="a folder of ENGINE-NUMBER.jsonl",
                    remedy="name the folder audit in the daemon's state_dir",
                )
            found += sorted(inside, key=_order)
        elif path.is_file():
            found.append(path)
        else:
            raise AuditError(str(path), value="no such file or folder")
    return list(dict.fromkeys(found))


def _order(path: Path) -> tuple[str, int]:
    named = _FILE.fullmatch(path.name)
    assert named is not None
    return named["stem"], int(named["number"])


def _parts(path: Path) -> list[Part]:
    """Where the runs of a file begin; none in an empty one."""
    begins: list[tuple[int, int, Entry]] = []
    offset = whole = number = 0
    with path.open("rb") as file:
        for text in file:
            number += 1
            if not text.endswith(b"\n"):
                break
            if text.startswith(_STARTS) or not begins:
                where = f"{path} line {number}"
                entry = _entry(text, where)
                if entry["kind"] != START:
                    raise AuditError(
                        where,
                        key="kind",
                        value=entry["kind"],
                        bound=f"{START} in the first line of a file",
                        remedy="give the whole file that trimtab run wrote",
                    )
                begins.append((offset, number, entry))
            offset += len(text)
        whole = offset
        torn = path.stat().st_size > whole
    ends = [begin for begin, _, _ in begins[1:]] + [whole]
    return [
        Part(
            path=path,
            line=line,
            begin=begin,
            end=end,
            start=entry,
            torn=torn and end == whole,
        )
        for (begin, line, entry), end in zip(begins, ends, strict=False)
    ]


def _entry(text: bytes, where: str) -> Entry:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise AuditError(
            where,
            value=text[:80].decode(errors="replace"),
            bound="JSON",
            remedy=f"the line was damaged after it was written ({fault})",
        ) from None
    if not isinstance(entry, dict) or entry.get("kind") not in KINDS:
        kind = entry.get("kind") if isinstance(entry, dict) else entry
        raise AuditError(where, key="kind", value=kind, bound=f"one of {', '.join(KINDS)}")
    return entry
