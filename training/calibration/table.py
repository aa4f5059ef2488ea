"""Reads tables of measured step times: CSV, one row a step (or a mean of equal steps).

It keeps the rows of one engine and says how many it left out; it fits nothing.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TableError, did_you_mean

FloatArray = npt.NDArray[np.float64]

REGIONS: Final = ("decode", "prefill", "mixed")
"""The kinds of step that errors are reported for."""
KINDS: Final[Mapping[str, str]] = {
    "decode": "decode",
    "prefill": "prefill",
    "prefill_chunk_with_prefix": "prefill",
    "mixed": "mixed",
    "mixed_prefix": "mixed",
}
"""Values of the column `kind`, with their region."""
WITHOUT_ATTENTION: Final = ("decode_nonattn", "prefill_nonattn", "mixed_nonattn")
"""Kinds of rows that hold no whole step; they are left out."""
REQUIRED: Final = (
    "model",
    "tp",
    "kind",
    "prefill_tokens",
    "prefill_prefix",
    "decode_batch",
    "decode_context",
    "iter_ms",
)
"""Columns that a table must have."""
PARTS: Final = ("nonattn_ms", "prefill_attn_ms", "decode_attn_ms", "allreduce_ms")
"""Optional columns that split `iter_ms`; the last is part of the first."""

_OPTIONAL: Final = ("prefill_chunks", "source", *PARTS)
_LARGEST: Final = 1e9


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Steps of one engine; every array has shape (n,), times in ms, NaN = not known."""

    region: npt.NDArray[np.int8]
    """Index into `REGIONS`."""
    tokens: FloatArray
    """All tokens of the step."""
    sequences: FloatArray
    chunks: FloatArray
    chunk_tokens: FloatArray
    pairs: FloatArray
    """Query-key pairs of the prefill chunks."""
    requests: FloatArray
    """Decoding requests."""
    kv_tokens: FloatArray
    """Context tokens that the decoding requests read."""
    iter_ms: FloatArray
    nonattn_ms: FloatArray
    prefill_attn_ms: FloatArray
    decode_attn_ms: FloatArray
    allreduce_ms: FloatArray
    sources: tuple[str, ...] = ()
    """Distinct texts of the column `source`, in order."""
    other_engine: int = 0
    """Rows left out because they are of another model or tensor-parallel size."""
    other_source: int = 0
    """Rows left out because their source does not hold the wanted text."""
    without_attention: int = 0
    """Rows left out because they hold no whole step."""

    def __len__(self) -> int:
        """Number of steps."""
        return len(self.iter_ms)

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """The given rows, in the given order."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        taken: dict[str, Any] = {
            name: column[rows] for name, column in columns.items() if isinstance(column, np.ndarray)
        }
        return replace(self, **taken)


def read_step_table(path: Path, *, model: str, tp: int, source: str = "") -> StepTable:
    """Read the steps of one engine.

    Args:
        path: CSV file with the columns `REQUIRED`; `prefill_chunks` (equal chunks that make up
            `prefill_tokens`, each after `prefill_prefix` cached tokens; 1 where absent), `source`
            and `PARTS` are used where they are there, others ignored.
        model: value of the column `model` to keep, without regard to case.
        tp: value of the column `tp` to keep.
        source: text that the column `source` must hold; empty keeps every row.

    Raises:
        TableError: one line with file, row, column, value, bound and remedy.
    """
    steps: list[tuple[float, ...]] = []
    seen: dict[tuple[str, int], int] = {}
    sources: dict[str, None] = {}
    left_out = {"other_engine": 0, "other_source": 0, "without_attention": 0}
    for where, row in _rows(path, need_source=bool(source)):
        engine = (row["model"], int(_number(where, row, "tp", low=1)))
        seen[engine] = seen.get(engine, 0) + 1
        if (engine[0].casefold(), engine[1]) != (model.casefold(), tp):
            left_out["other_engine"] += 1
        elif source.casefold() not in row.get("source", "").casefold():
            left_out["other_source"] += 1
        elif row["kind"] in WITHOUT_ATTENTION:
            left_out["without_attention"] += 1
        else:
            steps.append(_step(where, row))
            sources.setdefault(row.get("source", ""))
    if not steps:
        found = ", ".join(f"{name} tp {size} ({count})" for (name, size), count in seen.items())
        wanted = f"a row of {model} tp {tp}" + (f" with source {source!r}" if source else "")
        raise TableError(
            str(path),
            value=f"rows of {found}" if found else "no rows",
            bound=wanted,
            remedy="choose another engine or table",
        )
    region, *columns = np.array(steps, np.float64).T
    names = [f.name for f in fields(StepTable)][1 : 1 + len(columns)]
    arrays: dict[str, Any] = dict(zip(names, columns, strict=True))
    return StepTable(
        region=region.astype(np.int8),
        sources=tuple(text for text in sources if text),
        other_engine=left_out["other_engine"],
        other_source=left_out["other_source"],
        without_attention=left_out["without_attention"],
        **arrays,
    )


def _rows(path: Path, *, need_source: bool) -> Iterator[tuple[str, dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(path, header, need_source=need_source)
            for cells in reader:
                where = f"{path} row {reader.line_num}"
                if not cells:
                    continue
                if len(cells) != len(header):
                    raise TableError(
                        where,
                        value=f"{len(cells)} cells",
                        bound=f"{len(header)} cells as in the header",
                        remedy="quote cells that hold commas",
                    )
                yield where, dict(zip(header, (cell.strip() for cell in cells), strict=True))
    except UnicodeDecodeError:
        raise TableError(
            str(path), value="binary data", bound="CSV as UTF-8 text", remedy="export it as CSV"
        ) from None
    except csv.Error as error:
        raise TableError(
            str(path), value=str(error), bound="CSV", remedy="export it as CSV"
        ) from None
    except OSError as error:
        raise TableError(
            str(path), value=error.strerror or "unreadable", bound="a readable CSV file"
        ) from None


def _check_header(path: Path, header: list[str], *, need_source: bool) -> None:
    if not any(header):
        raise TableError(str(path), value="an empty file", bound="a CSV with a header")
    for name in (*REQUIRED, "source") if need_source else REQUIRED:
        if name not in header:
            raise TableError(
                f"{path} row 1",
                key=name,
                value="missing column",
                bound="in the header",
                remedy=f"needed are {', '.join(REQUIRED)}",
            )
    for name in (*REQUIRED, *_OPTIONAL):
        if header.count(name) > 1:
            raise TableError(f"{path} row 1", key=name, value="twice in the header", bound="once")


def _step(where: str, row: Mapping[str, str]) -> tuple[float, ...]:
    kind = row["kind"]
    if kind not in KINDS:
        known = (*KINDS, *WITHOUT_ATTENTION)
        raise TableError(
            where,
            key="kind",
            value=kind,
            bound=f"one of {', '.join(known)}",
            remedy=did_you_mean(kind, known),
        )
    region = KINDS[kind]
    prefill = _count(where, row, "prefill_tokens", low=0 if region == "decode" else 1)
    prefix = _count(where, row, "prefill_prefix")
    batch = _count(where, row, "decode_batch", low=0 if region == "prefill" else 1)
    context = _count(where, row, "decode_context", low=1 if batch else 0)
    _must_be_zero(where, kind, "prefill_tokens" if region == "decode" else "", prefill)
    _must_be_zero(where, kind, "decode_batch" if region == "prefill" else "", batch)
    chunks = 0.0
    if prefill:
        chunks = _count(where, row, "prefill_chunks", low=1) if row.get("prefill_chunks") else 1.0
    parts = [_number(where, row, name) if row.get(name) else math.nan for name in PARTS]
    return (
        float(REGIONS.index(region)),
        prefill + batch,
        chunks + batch,
        chunks,
        prefill,
        prefill * prefix + prefill * (prefill / chunks) / 2 if chunks else 0.0,
        batch,
        batch * context,
        _number(where, row, "iter_ms", low=1e-6),
        *parts,
    )


def _must_be_zero(where: str, kind: str, key: str, value: float) -> None:
    if key and value:
        raise TableError(
            where,
            key=key,
            value=value,
            bound=f"0 in a row of kind {kind}",
            remedy="mixed steps have the kind mixed or mixed_prefix",
        )


def _count(where: str, row: Mapping[str, str], key: str, *, low: float = 0.0) -> float:
    number = _number(where, row, key, low=low)
    if number != math.floor(number):
        raise TableError(where, key=key, value=row[key], bound="a whole number")
    return number


def _number(where: str, row: Mapping[str, str], key: str, *, low: float = 0.0) -> float:
    try:
        number = float(row[key])
    except ValueError:
        number = math.nan
    if not low <= number <= _LARGEST:
        remedy = "mend or delete the row" if row[key] else "fill in the cell or delete the row"
        bound = f"a number from {low:g} to {_LARGEST:g}"
        raise TableError(where, key=key, value=row[key], bound=bound, remedy=remedy)
    return number
