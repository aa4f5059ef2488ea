"""A stretch of an engine's traffic log: the requests that arrived in it, and some time before.

It reads; what the requests say is `figures`' and `cause`'s business.
"""

from __future__ import annotations

import calendar
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import with_sorted_names
from trimtab.training.traces.canonical import Rows
from trimtab.training.traces.table import Chunk
from trimtab.training.traces.traffic_log import (
    RECORDED,
    dropped_rows,
    log_chunks,
    log_files,
    origin_unix_s,
)

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

MOST_REQUESTS: Final = 300_000
"""Most requests that are looked at; the oldest are left out."""
_NAME: Final = re.compile(r"traffic-(\d{8}T\d{6})-(\d+)-\d+\.parquet")
"""When a file was written, and by which process."""
_CLOCK_SLACK_S: Final = 60.0
_RECORDED: Final[dict[str, tuple[pa.DataType, Any]]] = {
    "cached_tokens": (pa.int64(), 0),
    "ttft_s": (pa.float64(), None),
    "e2e_s": (pa.float64(), None),
    "outcome": (pa.string(), "finished"),
    "preemptions": (pa.int64(), 0),
}
"""Type of what the engine has recorded, and what stands for it where a log has no such column."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Requests of n rows, sorted by arrival: those before the window, then those in it."""

    trace: Trace
    """The requests; `arrival_s` counts from `start_unix_s`."""
    start_unix_s: float
    """Time zero of `trace`, seconds since 1970."""
    window_s: float
    """Length of the window, seconds."""
    before_s: float
    """How far the log reaches back before the window, seconds; 0: not at all."""
    cached_tokens: LongArray
    """Prompt tokens that the engine's cache saved, shape (n,); 0 where it never began."""
    began: BoolArray
    """Whether a first token came, shape (n,)."""
    ttft_s: FloatArray
    """Time to first token, seconds, NaN without one, shape (n,)."""
    e2e_s: FloatArray
    """Time to the end of the answer, seconds, NaN without one, shape (n,)."""
    ended_well: BoolArray
    """Whether the last token came, shape (n,)."""
    outcomes: tuple[str, ...]
    """What became of each request."""
    preemptions: LongArray
    """How often each lost its place, shape (n,)."""
    lost_rows: int
    """Requests that the log lost in this time, because the disk was slow or full."""

    @property
    def since_unix_s(self) -> float:
        """Start of the window, seconds since 1970."""
        return self.start_unix_s + self.before_s

    @property
    def in_window(self) -> BoolArray:
        """Which rows arrived in the window, shape (n,)."""
        return np.asarray(self.trace.arrival_s >= self.before_s)

    def window_trace(self) -> Trace:
        """The window's requests as a trace of their own, from its start on."""
        taken = self.trace.take(np.flatnonzero(self.in_window))
        ids = np.unique(taken.prefix_ids, return_inverse=True)[1].astype(np.int32).reshape(-1)
        moved = replace(taken, arrival_s=taken.arrival_s - self.before_s, prefix_ids=ids)
        return with_sorted_names(moved)


def read_logged(
    folder: Path, *, since_unix_s: float | None, window_s: float, before_s: float
) -> Logged:
    """Read a window of a traffic log and the time before it.

    Args:
        folder: Folder of the log.
        since_unix_s: Start of the window, seconds since 1970; None: it ends with the newest
                request.
        window_s: Its length, seconds.
        before_s: How far to look back before it, seconds.

    Raises:
        TraceError: the folder holds no log, a file of it is damaged, or no request arrived in the
            window.
    """
    files = log_files(folder)
    if not files:
        raise TraceError(
            str(folder),
            bound="a folder with traffic-*.parquet",
            remedy="start the engine with traffic_log_dir, or name its folder",
        )
    if since_unix_s is None:
        since_unix_s = _newest_unix_s(files) - window_s + 1e-3
    start_unix_s = since_unix_s - before_s
    files = [file for file in files if _may_hold(file, start_unix_s)]
    read = [(file, _rows_of(file, start_unix_s, before_s + window_s)) for file in files]
    tables = [table for _, table in read if table is not None]
    rows = _joined(tables).sort_by("arrival_s") if tables else None
    if rows is None or not pc.any(pc.greater_equal(rows["arrival_s"], before_s)).as_py():
        raise TraceError(
            str(folder),
            value=f"no request between {_utc(since_unix_s)} and {_utc(since_unix_s + window_s)}",
            remedy="requests are logged when they end; name another time, or flush the log first",
        )
    rows = rows.slice(max(0, rows.num_rows - MOST_REQUESTS))
    lost_rows = _lost([file for file, table in read if table is not None])
    return _logged(rows, folder.name, since_unix_s, window_s, before_s, lost_rows)


def _logged(
    rows: pa.Table,
    name: str,
    since_unix_s: float,
    window_s: float,
    before_s: float,
    lost_rows: int,
) -> Logged:
    # Nothing is known of the time before the first request that is left.
    reach_s = float(np.clip(before_s - rows["arrival_s"][0].as_py(), 0.0, before_s))
    arrivals = pc.subtract(rows["arrival_s"], before_s - reach_s)
    rows = rows.set_column(rows.schema.get_field_index("arrival_s"), "arrival_s", arrivals)
    rows = rows.combine_chunks()
    columns = {key: rows[key].chunk(0) for key in rows.column_names}
    recorded = {key: columns.pop(key) for key in _RECORDED}
    into = Rows(rows.num_rows, {})
    into.add(Chunk(name, "row", 1, columns))
    ttft_s = recorded["ttft_s"].to_numpy(zero_copy_only=False)
    outcomes = tuple(recorded["outcome"].to_pylist())
    return Logged(
        trace=with_sorted_names(into.finish(name, ())),
        start_unix_s=since_unix_s - reach_s,
        window_s=window_s,
        before_s=reach_s,
        cached_tokens=_whole(recorded["cached_tokens"]),
        began=np.isfinite(ttft_s),
        ttft_s=ttft_s,
        e2e_s=recorded["e2e_s"].to_numpy(zero_copy_only=False),
        ended_well=np.array([outcome == "finished" for outcome in outcomes]),
        outcomes=outcomes,
        preemptions=_whole(recorded["preemptions"]),
        lost_rows=lost_rows,
    )


def _whole(column: pa.Array) -> LongArray:
    filled = pc.fill_null(column, 0)
    return np.asarray(filled.to_numpy(zero_copy_only=False), np.int64)


def _may_hold(file: Path, start_unix_s: float) -> bool:
    """Whether a file can hold requests that arrived after a time.

    Its name tells when it was written, and requests are written when they have ended.
    """
    found = _NAME.fullmatch(file.name)
    if found is None:
        return True
    written = calendar.timegm(time.strptime(found[1], "%Y%m%dT%H%M%S"))
    return written + _CLOCK_SLACK_S >= start_unix_s


def _rows_of(file: Path, start_unix_s: float, span_s: float) -> pa.Table | None:
    """A file's rows that arrived within `span_s` from a time on, which is their time zero."""
    try:
        later_s = origin_unix_s(file) - start_unix_s
        kept = [_within(chunk, span_s) for chunk in log_chunks(file, later_s)]
    except TraceError:
        if file.exists():
            raise
        return None  # The engine keeps so many files and has just deleted this one.
    tables = [table for table in kept if table.num_rows]
    return _joined(tables) if tables else None


def _lost(files: list[Path]) -> int:
    """Rows lost between a process's first and last of these files: each counts since its start."""
    counts: dict[str, list[int]] = {}
    for file in files:
        found = _NAME.fullmatch(file.name)
        if found is not None and file.exists():
            counts.setdefault(found[2], []).append(dropped_rows(file))
    return sum(max(of_process) - min(of_process) for of_process in counts.values())


def _within(chunk: Chunk, span_s: float) -> pa.Table:
    kept = {name: column for name, column in chunk.columns.items() if name not in RECORDED}
    for name, (kind, value) in _RECORDED.items():
        found = chunk.columns.get(name)
        kept[name] = pa.array([value] * len(chunk), kind) if found is None else found.cast(kind)
    arrival_s = kept["arrival_s"]
    inside = pc.and_(pc.greater_equal(arrival_s, 0.0), pc.less(arrival_s, span_s))
    return pa.table(kept).filter(inside)


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables, promote_options="permissive")


def _newest_unix_s(files: list[Path]) -> float:
    newest = [
        origin_unix_s(file) + max(pc.max(chunk.columns["arrival_s"]).as_py() for chunk in chunks)
        for file in files[-4:]
        if (chunks := list(log_chunks(file, 0.0)))
    ]
    if not newest:
        raise TraceError(str(files[-1].parent), remedy="the log holds no request yet")
    return float(max(newest))


def _utc(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(unix_s))
