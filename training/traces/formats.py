"""The trace formats: which one a file is in, by its content, and the reader of each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trimtab.engine_bridge.errors import FlagError, TraceError, did_you_mean
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces import (
    azure,
    burstgpt,
    canonical,
    mooncake,
    servegen,
    traffic_log,
    vidur,
)
from trimtab.training.traces.agent_sessions import read_agent_sessions, session_files
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.source import head_of, reading
from trimtab.training.traces.table import header_of

Reader = Callable[[Path, np.random.Generator, Label, ReadOptions], Trace]

_PARQUET_MAGIC = b"PAR1"
_SESSION_MARKS = (b'"requests"', b'"hash_id_scope"', b'"block_size"')


def _read_trimtab(
    path: Path, rng: np.random.Generator, label: Label, options: ReadOptions
) -> Trace:
    if path.is_dir():
        return traffic_log.read_traffic_log(path, rng, label, options)
    packed = head_of(path, 4) == _PARQUET_MAGIC
    if packed and traffic_log.is_log_file(path):
        return traffic_log.read_traffic_log(path, rng, label, options)
    read = canonical.read_canonical_parquet if packed else canonical.read_canonical_csv
    return read(path, rng, label, options)


READERS: dict[str, Reader] = {
    "trimtab": _read_trimtab,
    "azure": azure.read_azure,
    "mooncake": mooncake.read_mooncake,
    "kv-cache-tester": read_agent_sessions,
    "servegen": servegen.read_servegen,
    "burstgpt": burstgpt.read_burstgpt,
    "vidur": vidur.read_vidur,
}
"""Reader by format name."""

DIRECTORY_FORMATS = ("trimtab", "kv-cache-tester", "servegen")
"""Formats of which a trace may be a directory of files."""


def read_trace(
    path: Path | str,
    *,
    rng: np.random.Generator,
    format: str | None = None,
    tier: str = "T0",
    tenant: str | None = None,
    options: ReadOptions | None = None,
) -> Trace:
    """Read recorded traffic in any known format.

    Args:
        path: File (plain or gzip) or directory.
        rng: Draws what a format leaves open (session starts, places in a batch, requests).
        format: One of `READERS`; None = chosen from the content.
        tier: Tier of every row, in formats that name none.
        tenant: Tenant of every row, in formats that name none.
        options: Choices that some formats need.

    Returns:
        The trace; its notes say what was changed or left out.

    Raises:
        TraceError: the file is not what its format says.
        FlagError: the format is not known.
    """
    path = Path(path)
    label = Label(tier=tier, tenant="default" if tenant is None else tenant)
    reader = READERS[check_format(format) if format is not None else detect_format(path)]
    if format is not None and path.is_dir() and format not in DIRECTORY_FORMATS:
        raise TraceError(str(path), remedy=f"it is a directory; {format} is one file")
    return reader(path, rng, label, options or ReadOptions())


def check_format(name: str, flag: str = "--format") -> str:
    """The format's name, if there is such a format.

    Raises:
        FlagError: with the format that was probably meant.
    """
    if name not in READERS:
        hint = did_you_mean(name, READERS)
        raise FlagError(flag, value=name, bound=f"one of {', '.join(READERS)}", remedy=hint)
    return name


def detect_format(path: Path | str) -> str:
    """Name the format of a file or directory from its content.

    Raises:
        TraceError: it cannot be read, is empty, or is in no known format.
    """
    path = Path(path)
    if path.is_dir():
        return _directory_format(path)
    head = head_of(path)
    if head.startswith(_PARQUET_MAGIC):
        return "trimtab"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    found = _json_format(text) if text.startswith(b"{") else _table_format(text.splitlines()[0])
    if found is None:
        shown = text.splitlines()[0][:60].decode("utf-8", "backslashreplace")
        raise TraceError(
            path.name,
            value=shown,
            bound=f"a trace in one of the formats {', '.join(READERS)}",
            remedy="its first line fits none; see docs/traces.md",
        )
    return found


def _directory_format(path: Path) -> str:
    with reading(path):
        if traffic_log.log_files(path):
            return "trimtab"
        if session_files(path):
            return "kv-cache-tester"
        if any(servegen.FILE_NAME.match(file.name) for file in path.iterdir()):
            return "servegen"
    raise TraceError(
        str(path),
        bound="a directory of trace_*.json[.gz], chunk-N-trace.csv[.gz] or traffic-*.parquet files",
        remedy="name the directory that holds the files themselves",
    )


def _json_format(text: bytes) -> str | None:
    line = text.splitlines()[0]
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict) and {"timestamp", "input_length"} & set(record):
        return "mooncake"
    if any(mark in text for mark in _SESSION_MARKS):
        return "kv-cache-tester"
    if any(mark in text for mark in (b'"input_tokens"', b'"text_tokens"', b'"output_tokens"')):
        return "servegen"
    # One object a line: what a mooncake file with misspelt fields looks like.
    return "mooncake" if isinstance(record, dict) and b"\n{" in text else None


def _table_format(line: bytes) -> str | None:
    names = set(header_of(line))
    by_columns: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("azure", (*azure.COLUMNS, azure.IMAGES)),
        ("vidur", (*vidur.COLUMNS, vidur.ARRIVAL)),
        ("burstgpt", burstgpt.COLUMNS),
        ("trimtab", (*canonical.WANTED, *canonical.OPTIONAL)),
    )
    best = max(by_columns, key=lambda entry: len(names.intersection(entry[1])))
    if names.intersection(best[1]):
        return best[0]
    cells = line.decode("utf-8", "replace").strip().split(",")
    numeric = all(_is_number(cell) for cell in cells[:3])
    return "servegen" if len(cells) == len(servegen.TRACE_COLUMNS) and numeric else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
