"""Open trace files: gzip by content, broken bytes as one-line errors. It parses no format."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

import pyarrow as pa

from trimtab.engine_bridge.errors import TraceError

_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_LINE_BYTES = 64 * 1024 * 1024
_LARGEST_JSON_BYTES = 1024 * 1024 * 1024

JsonObject = dict[str, object]


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what broken bytes make the decoders raise into a `TraceError` with the file."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise TraceError(
            path.name, value=str(fault), remedy="the gzip stream is cut or damaged; copy it again"
        ) from fault
    except UnicodeDecodeError as fault:
        raise TraceError(
            path.name,
            value=f"byte {fault.object[fault.start]:#04x} at {fault.start}",
            bound="UTF-8 text",
            remedy="convert the file to UTF-8",
        ) from fault
    except RecursionError as fault:
        raise TraceError(path.name, remedy="the JSON is nested too deep for a trace") from fault
    except pa.ArrowException as fault:
        raise TraceError(
            path.name, value=str(fault).splitlines()[0][:200], remedy="the file is damaged"
        ) from fault
    except OSError as fault:
        raise TraceError(
            f"{path}: cannot be read: {fault.strerror or fault}", remedy="check the path"
        ) from fault


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading; gzip is undone whatever the file's name says.

    Raises:
        TraceError: the file does not exist, is a directory or may not be read.
    """
    with reading(path):
        with path.open("rb") as raw:
            packed = raw.read(2) == _GZIP_MAGIC
        return cast(IO[bytes], gzip.open(path, "rb")) if packed else path.open("rb")


def head_of(path: Path, size_bytes: int = 65_536) -> bytes:
    """The first bytes of a file, unpacked.

    Raises:
        TraceError: the file cannot be read or holds nothing.
    """
    with open_bytes(path) as stream, reading(path):
        head = stream.read(size_bytes)
    if not head.strip():
        raise TraceError(f"{path.name}: the file is empty", remedy="name a file with requests")
    return head


def json_lines(path: Path) -> Iterator[tuple[int, JsonObject]]:
    """Yield (line number from 1, object) of a JSON-lines file; empty lines are passed over.

    Raises:
        TraceError: a line is not JSON or not an object.
    """
    with open_bytes(path) as stream, reading(path):
        number = 0
        while line := stream.readline(_LONGEST_LINE_BYTES):
            number += 1
            if not line.strip():
                continue
            yield number, json_object(line, f"{path.name} line {number}")


def json_file(path: Path) -> JsonObject:
    """Read a file that holds one JSON object.

    Raises:
        TraceError: the file is not JSON, not an object, or too large.
    """
    with open_bytes(path) as stream, reading(path):
        text = stream.read(_LARGEST_JSON_BYTES + 1)
        if len(text) > _LARGEST_JSON_BYTES:
            raise TraceError(path.name, value=len(text), bound="at most 1 GiB of JSON")
        return json_object(text, path.name)


def json_object(text: bytes, where: str) -> JsonObject:
    """Parse one JSON object.

    Raises:
        TraceError: it is not JSON or not an object.
    """
    try:
        value = json.loads(text)
    except UnicodeDecodeError:
        raise
    except ValueError as fault:
        raise TraceError(where, value=str(fault)[:120], bound="JSON") from fault
    if not isinstance(value, dict):
        raise TraceError(where, value=type(value).__name__, bound="a JSON object")
    return value
