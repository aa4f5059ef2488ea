"""Reads an engine's traffic log: the rotating files that `trimtab serve` writes, as one trace.

Each file states when its clock began; the rows of all are put on one clock that begins with the
first arrival. The columns are those of `canonical`, and some about how the engine did, which a
trace has no place for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import with_sorted_names
from trimtab.training.traces.canonical import OPTIONAL, WANTED, Rows, batches
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.source import reading
from trimtab.training.traces.table import Chunk, check_columns

METADATA_KEY: Final = b"trimtab.traffic"
"""Key of the Parquet metadata that marks a file of a traffic log; JSON with `origin_unix_s`."""
RECORDED: Final = ("cached_tokens", "frontend_s", "ttft_s", "e2e_s", "outcome", "preemptions")
"""Columns about the engine, which a replay finds out anew."""
_PATTERN: Final = "traffic-*.parquet"


def log_files(path: Path) -> list[Path]:
    """The files of a traffic log in a folder, oldest first; none if it holds no log."""
    return sorted(path.glob(_PATTERN))


def is_log_file(path: Path) -> bool:
    """Whether a Parquet file belongs to a traffic log."""
    with reading(path):
        return METADATA_KEY in (pq.read_schema(path).metadata or {})


def read_traffic_log(
    path: Path, rng: np.random.Generator, label: Label, options: ReadOptions
) -> Trace:
    """Read a folder of log files, or one file.

    Args:
        path: Folder or file.
        rng: Not used: a log leaves nothing to chance.
        label: Not used: the log names tiers and tenants.
        options: Not used.

    Raises:
        TraceError: a file is damaged or is none of a traffic log, or there is no row.
    """
    files = log_files(path) if path.is_dir() else [path]
    if not files:
        raise TraceError(str(path), bound=f"a folder with {_PATTERN}")
    origins = [origin_unix_s(file) for file in files]
    rows, unanswered = Rows(0, {}), 0
    for file, origin in zip(files, origins, strict=True):
        for chunk in log_chunks(file, origin - min(origins)):
            unanswered += _unanswered(chunk)
            rows.add(chunk)
    trace = with_sorted_names(rows.finish(path.name, ()))
    # Rows are written as requests end: that they do not stand in order of arrival is no news.
    notes = [f"{path.name}: a traffic log of {len(files):,} file(s)."]
    if unanswered:
        notes.append(
            f"{path.name}: {unanswered:,} requests did not end with their last token; their output"
            " lengths are what was generated until then."
        )
    arrival_s = trace.arrival_s - trace.arrival_s[0]
    return replace(trace, arrival_s=arrival_s, notes=tuple(notes))


def origin_unix_s(file: Path) -> float:
    """When a file's clock began, seconds since 1970.

    Raises:
        TraceError: the file is none of a traffic log.
    """
    try:
        origin = float(_facts(file)["origin_unix_s"])
    except (KeyError, ValueError, TypeError, RecursionError):
        origin = math.nan
    if not math.isfinite(origin):
        raise TraceError(
            file.name,
            key=METADATA_KEY.decode(),
            bound="metadata with origin_unix_s",
            remedy="it is no file of a traffic log; move it out of the folder",
        )
    return origin


def dropped_rows(file: Path) -> int:
    """Requests that the log had lost when a file was written, since its engine's start."""
    try:
        return int(_facts(file)["dropped_rows"])
    except (KeyError, ValueError, TypeError, RecursionError):
        return 0


def _facts(file: Path) -> Any:
    with reading(file):
        metadata = pq.read_schema(file).metadata or {}
    return json.loads(metadata[METADATA_KEY])


def log_chunks(path: Path, later_s: float) -> Iterator[Chunk]:
    """The rows of one file, in pieces, with all arrivals so many seconds later.

    Raises:
        TraceError: the file is damaged, or its columns are not a log's.
    """
    with reading(path), pq.ParquetFile(path, pre_buffer=False) as file:
        known = (*OPTIONAL, *RECORDED)
        check_columns(path.name, list(file.schema_arrow.names), WANTED, known, True)
        for chunk in batches(file, path.name):
            shifted = pc.add(chunk.columns["arrival_s"], later_s)
            yield replace(chunk, columns={**chunk.columns, "arrival_s": shifted})


def _unanswered(chunk: Chunk) -> int:
    if "outcome" not in chunk.columns:
        return 0
    return int(pc.sum(pc.not_equal(chunk.columns["outcome"], "finished")).as_py() or 0)
