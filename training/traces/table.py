"""Stream delimited text in chunks and parse its numbers with exact places of faults.

It knows no trace format: readers name the columns they want.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from trimtab.engine_bridge.errors import TraceError, did_you_mean
from trimtab.training.traces.source import open_bytes, reading

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

MOST_TOKENS = 10_000_000
"""Longest prompt or answer that a trace may hold, tokens: a typing error above it."""
LONGEST_S = 1e9
"""Latest time that a trace may hold, seconds (over 30 years)."""
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a table, every value still as the file has it."""

    file: str
    unit: str
    """What people call a row of this file: `line` (text) or `row` (Parquet)."""
    first: int
    """Number of the first row, counted in `unit` from 1 (a header is line 1)."""
    columns: dict[str, pa.Array]

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self.columns.values())))

    def place(self, index: int) -> str:
        """Where a person finds row `index` of this chunk."""
        return f"{self.file} {self.unit} {self.first + index}"

    def numbers(
        self, key: str, *, low: float, high: float, missing: float | None = None
    ) -> FloatArray:
        """Parse a column as finite floats in [low, high].

        Args:
            key: Column.
            low: Least right value.
            high: Greatest right value.
            missing: Value for empty cells; None refuses them.

        Raises:
            TraceError: with the first bad row.
        """
        values = self._floats(key)
        empty = _empty(self.columns[key])
        bound = f"a number from {low:g} to {high:g}"
        if missing is None:
            self._refuse(key, empty, bound)
        else:
            values = np.where(empty, missing, values)
        with np.errstate(invalid="ignore"):
            bad = ~((values >= low) & (values <= high))
        self._refuse(key, bad & ~empty, bound)
        return values

    def integers(
        self, key: str, *, low: int, high: int = MOST_TOKENS, missing: int | None = None
    ) -> LongArray:
        """Parse a column as whole numbers in [low, high]; `12.0` is a whole number.

        Raises:
            TraceError: with the first bad row.
        """
        values = self.numbers(
            key, low=low, high=high, missing=None if missing is None else float(missing)
        )
        self._refuse(key, values != np.floor(values), "a whole number")
        return values.astype(np.int64)

    def texts(self, key: str) -> pa.Array:
        """A column as strings; null where the cell is empty."""
        return pc.fill_null(self.columns[key].cast(pa.string()), "")

    def _floats(self, key: str) -> FloatArray:
        column = self.columns[key]
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
            try:
                column = pc.cast(column, pa.float64())
            except pa.ArrowInvalid:
                self._refuse_text(key, column)
        elif not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise TraceError(
                self.file, key=key, value=str(column.type), bound="a column of numbers"
            )
        else:
            column = pc.cast(column, pa.float64(), safe=False)
        # An overflow to infinity and a NaN in the file are refused by the bounds, not here.
        values: FloatArray = column.to_numpy(zero_copy_only=False)
        return values

    def _refuse_text(self, key: str, column: pa.Array) -> None:
        for index, cell in enumerate(column):
            if cell.is_valid:
                try:
                    pc.cast(cell, pa.float64())
                except pa.ArrowInvalid:
                    raise TraceError(
                        self.place(index), key=key, value=cell.as_py(), bound="a number"
                    ) from None

    def _refuse(self, key: str, bad: npt.NDArray[np.bool_], bound: str) -> None:
        if bad.any():
            index = int(np.argmax(bad))
            cell = self.columns[key][index].as_py()
            raise TraceError(
                self.place(index),
                key=key,
                value="" if cell is None else cell,
                bound=bound,
                remedy="mend or leave out the row",
            )


def _empty(column: pa.Array) -> npt.NDArray[np.bool_]:
    null = pc.is_null(column)
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        null = pc.or_(null, pc.fill_null(pc.equal(column, ""), False))
    flags: npt.NDArray[np.bool_] = null.to_numpy(zero_copy_only=False)
    return flags


def header_of(line: bytes) -> list[str]:
    """The column names of a header line, without quotes, blanks and a byte-order mark."""
    text = line.decode("utf-8", "replace").lstrip("\ufeff").strip("\r\n")
    return [name.strip().strip('"') for name in text.split(",")]


def read_chunks(
    path: Path,
    *,
    wanted: tuple[str, ...],
    optional: tuple[str, ...] = (),
    strict: bool = False,
    names: tuple[str, ...] = (),
) -> Iterator[Chunk]:
    """Stream a comma-separated file.

    Args:
        path: File, plain or gzip.
        wanted: Columns that must be there.
        optional: Columns that are read where they are there.
        strict: Refuse columns that are neither wanted nor optional.
        names: Names of the columns of a file without a header line.

    Raises:
        TraceError: a column is missing, doubled or not known, or a line is not a row.
    """
    with open_bytes(path) as stream, reading(path):
        faults: list[TraceError] = []
        source = pa.PythonFile(_Utf8(stream, path.name), mode="r")
        try:
            with pacsv.open_csv(
                source,
                read_options=pacsv.ReadOptions(
                    use_threads=False, block_size=_BLOCK_BYTES, column_names=list(names) or None
                ),
                parse_options=pacsv.ParseOptions(invalid_row_handler=_row_fault(path, faults)),
                convert_options=pacsv.ConvertOptions(
                    column_types=_all_text(path, names), strings_can_be_null=False
                ),
            ) as table:
                yield from _chunks(table, path, wanted, optional, strict, bool(names))
        except pa.ArrowInvalid as fault:
            if faults:
                raise faults[0] from None
            raise TraceError(
                path.name, value=str(fault).splitlines()[0][:160], bound="comma-separated text"
            ) from fault


class _Utf8:
    """A stream that refuses bytes that are no UTF-8, with their line.

    Arrow looks at the encoding only after it has split the rows, and its message has no place.
    """

    closed = False

    def __init__(self, stream: IO[bytes], file: str) -> None:
        self._stream, self._file = stream, file
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._lines = 1

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        try:
            self._decoder.decode(data, final=len(data) < size)
        except UnicodeDecodeError as fault:
            line = self._lines + data.count(b"\n", 0, fault.start)
            raise TraceError(
                f"{self._file} line {line}",
                value=f"byte {fault.object[fault.start]:#04x}",
                bound="UTF-8 text",
                remedy="convert the file to UTF-8",
            ) from None
        self._lines += data.count(b"\n")
        return data

    def close(self) -> None:
        self.closed = True


def _all_text(path: Path, names: tuple[str, ...]) -> dict[str, pa.DataType]:
    if names:
        return dict.fromkeys(names, pa.string())
    with open_bytes(path) as stream, reading(path):
        header = stream.readline(1 << 16).decode("utf-8", "replace").strip("\r\n")
    raw = [name.strip('"') for name in header.lstrip("\ufeff").split(",")]
    return dict.fromkeys(raw, pa.string())


def _row_fault(path: Path, faults: list[TraceError]) -> Callable[[pacsv.InvalidRow], str]:
    def handle(row: pacsv.InvalidRow) -> str:
        where = path.name if row.number is None else f"{path.name} line {row.number}"
        faults.append(
            TraceError(
                where,
                value=row.text[:60],
                bound=f"{row.expected_columns} columns",
                remedy=f"it has {row.actual_columns}",
            )
        )
        return "error"

    return handle


def _chunks(
    table: pacsv.CSVStreamingReader,
    path: Path,
    wanted: tuple[str, ...],
    optional: tuple[str, ...],
    strict: bool,
    headless: bool,
) -> Iterator[Chunk]:
    raw = list(table.schema.names)
    check_columns(path.name, raw, wanted, optional, strict)
    index = {name.strip(): number for number, name in enumerate(raw)}
    keep = [name for name in (*wanted, *optional) if name in index]
    first, rows = (1 if headless else 2), 0
    for batch in table:
        if batch.num_rows:
            columns = {name: batch.column(index[name]) for name in keep}
            yield Chunk(path.name, "line", first + rows, columns)
            rows += batch.num_rows
    if not rows:
        raise TraceError(path.name, remedy="the file has a header but no rows")


def check_columns(
    file: str,
    names: list[str],
    wanted: tuple[str, ...],
    optional: tuple[str, ...],
    strict: bool,
) -> None:
    """Refuse missing, doubled and (where strict) unknown columns.

    Raises:
        TraceError: with the column, and the name that was probably meant.
    """
    stripped = [name.strip() for name in names]
    for name in stripped:
        if stripped.count(name) > 1 and name in (*wanted, *optional):
            raise TraceError(file, key=name, remedy="the column is there twice; leave one out")
    missing = [name for name in wanted if name not in stripped]
    known = (*wanted, *optional)
    unknown = [name for name in stripped if name not in known]
    if strict and unknown:
        hint = did_you_mean(unknown[0], [name for name in known if name not in stripped])
        remedy = hint or f"known are {', '.join(known)}"
        raise TraceError(file, key=unknown[0], bound="a known column", remedy=remedy)
    if missing:
        hint = did_you_mean(missing[0], unknown)
        raise TraceError(file, key=missing[0], bound="a column of the file", remedy=hint)
