"""Trimtab's own trace form: the columns of Parquet and CSV files, and how they are read.

It writes nothing (`canonical_write` does).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.training.traces.assemble import (
    Column,
    Names,
    build_sorted,
    dense_ids,
    offsets_of,
    with_sorted_names,
)
from trimtab.training.traces.media_column import KEY as MEDIA
from trimtab.training.traces.media_column import MediaColumn
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.source import reading
from trimtab.training.traces.table import (
    LONGEST_S,
    MOST_TOKENS,
    Chunk,
    check_columns,
    read_chunks,
)

WANTED = ("arrival_s", "tenant", "tier", "prompt_tokens", "output_tokens")
OPTIONAL = (
    "session",
    "turn",
    "think_s",
    "prefix_ids",
    "prefix_block_tokens",
    "cancel_after_s",
    "stop_reason",
    "image_tokens",
    "media",
    "acceptance",
)
METADATA_KEY = b"trimtab.trace"
"""Key of the Parquet metadata that holds the names in their order, and the notes, as JSON."""
BATCH_ROWS = 131_072
MOST_TIERS = 8
_INT32_MAX = 2**31 - 1


class Rows:
    """The columns of a canonical file while it streams in."""

    def __init__(self, rows: int, names: dict[str, list[str]]) -> None:
        """Start empty.

        Args:
            rows: Expected number of rows (a hint).
            names: Tier, tenant and stop names that come first, as a file's metadata has them.
        """
        self.tiers = Names(tuple(names.get("tier_names", ())))
        self.tenants = Names(tuple(names.get("tenant_names", ())))
        self.stops = Names(tuple(names.get("stop_names", ("",))))
        self._sessions = Names()
        self._rows = rows
        self._columns: dict[str, Column] = {}
        self._lengths: Column | None = None
        self._media: MediaColumn | None = None
        self._ids = Column(np.int64)

    def add(self, chunk: Chunk) -> None:
        """Check and append the rows of a chunk."""
        self._put("arrival_s", np.float64, _arrivals(chunk))
        self._put("prompt_tokens", np.int32, chunk.integers("prompt_tokens", low=1))
        self._put("output_tokens", np.int32, chunk.integers("output_tokens", low=1))
        self._put("tier", np.int32, _numbers_of(chunk, "tier", self.tiers))
        self._put("tenant", np.int32, _numbers_of(chunk, "tenant", self.tenants))
        has = chunk.columns
        if "session" in has:
            self._put("session", np.int32, self._session(chunk))
        if "turn" in has:
            self._put("turn", np.int32, chunk.integers("turn", low=0, missing=0))
        if "think_s" in has:
            values = chunk.numbers("think_s", low=0, high=LONGEST_S, missing=0.0)
            self._put("think_s", np.float64, values)
        if "cancel_after_s" in has:
            self._put("cancel_after_s", np.float64, _cancels(chunk))
        if "stop_reason" in has:
            self._put(
                "stop_reason", np.int32, _numbers_of(chunk, "stop_reason", self.stops, empty=True)
            )
        if MEDIA in has or "image_tokens" in has:
            if self._media is None:
                self._media = MediaColumn(self._rows)
            self._media.add(chunk)
        if "acceptance" in has:
            values = chunk.numbers("acceptance", low=0, high=1, missing=np.nan)
            self._put("acceptance", np.float64, values)
        if "prefix_ids" in has:
            self._prefixes(chunk)

    def finish(self, where: str, notes: tuple[str, ...]) -> Trace:
        """Put the columns together.

        Raises:
            TraceError: the columns contradict each other.
        """
        if not self._columns:
            # A damaged file may announce rows that it does not hold.
            raise TraceError(where, remedy="the file has columns but no rows")
        if len(self.tiers.names) > MOST_TIERS:
            raise TraceError(
                where, key="tier", value=f"{len(self.tiers.names)} tiers", bound="at most 8 tiers"
            )
        columns: dict[str, Any] = {name: col.finish() for name, col in self._columns.items()}
        if self._lengths is not None:
            columns["prefix_offsets"] = offsets_of(self._lengths.finish())
            columns["prefix_ids"] = dense_ids(self._ids.finish())
        if self._media is not None:
            columns["media"] = self._media.finish()
        if "session" in columns and "turn" not in columns:
            raise TraceError(
                where, key="turn", remedy="sessions need the column turn (0, 1, 2, ...)"
            )
        return build_sorted(
            where,
            tier_names=self.tiers.names,
            tenant_names=self.tenants.names,
            stop_names=self.stops.names,
            notes=notes,
            **columns,
        )

    def _put(self, name: str, dtype: npt.DTypeLike, values: npt.NDArray[Any]) -> None:
        if name not in self._columns:
            self._columns[name] = Column(dtype, rows=self._rows)
        self._columns[name].extend(values)

    def _session(self, chunk: Chunk) -> npt.NDArray[np.int64]:
        column = chunk.columns["session"]
        if pa.types.is_integer(column.type):
            return chunk.integers("session", low=0, high=_INT32_MAX, missing=NO_SESSION)
        texts = chunk.texts("session")
        short = pc.all(pc.match_substring_regex(texts, r"^\d{0,9}$")).as_py()
        # A number below 0 is no name: it is what other tools write for "none", or an error.
        negative = pc.any(pc.match_substring_regex(texts, r"^-\d+$")).as_py()
        if negative or (short and not self._sessions.names):
            return chunk.integers("session", low=0, high=_INT32_MAX, missing=NO_SESSION)
        return _numbers_of(chunk, "session", self._sessions, empty=True, none=NO_SESSION)

    def _prefixes(self, chunk: Chunk) -> None:
        if "prefix_block_tokens" not in chunk.columns:
            raise TraceError(
                chunk.file,
                key="prefix_block_tokens",
                remedy="the column is missing; prefix_ids need it",
            )
        lengths, ids = _prefix_lists(chunk)
        block = chunk.integers("prefix_block_tokens", low=0, high=MOST_TOKENS, missing=0)
        tokens = chunk.integers("prompt_tokens", low=1) + chunk.integers("output_tokens", low=1)
        bad = (lengths > 0) & ((block < 1) | (lengths * np.maximum(block, 1) > tokens))
        if bad.any():
            row = int(np.argmax(bad))
            raise TraceError(
                chunk.place(row),
                key="prefix_ids",
                value=f"{lengths[row]} ids of {block[row]} tokens",
                bound=f"full blocks inside the {tokens[row]} tokens of prompt and answer",
            )
        if self._lengths is None:
            self._lengths = Column(np.int32, rows=self._rows)
        self._lengths.extend(lengths)
        self._ids.extend(ids)
        self._put("prefix_block_tokens", np.int32, np.where(lengths > 0, block, 0))


def _arrivals(chunk: Chunk) -> npt.NDArray[np.float64]:
    # Only first turns have to say when they arrive; the others follow the turn before them.
    later = np.zeros(len(chunk), np.bool_)
    if "turn" in chunk.columns:
        later = chunk.integers("turn", low=0, missing=0) > 0
    values = chunk.numbers("arrival_s", low=0, high=LONGEST_S, missing=0.0 if later.any() else None)
    if later.any():
        empty = chunk.columns["arrival_s"].is_null().to_numpy(zero_copy_only=False) & ~later
        if empty.any():
            raise TraceError(
                chunk.place(int(np.argmax(empty))),
                key="arrival_s",
                value="",
                bound="a number in a session's first turn",
            )
    return values


def _cancels(chunk: Chunk) -> npt.NDArray[np.float64]:
    values = chunk.numbers("cancel_after_s", low=0, high=np.inf, missing=np.inf)
    zero = values <= 0
    if zero.any():
        raise TraceError(
            chunk.place(int(np.argmax(zero))), key="cancel_after_s", value=0.0, bound="above 0"
        )
    return values


def _numbers_of(
    chunk: Chunk, key: str, names: Names, *, empty: bool = False, none: int = 0
) -> npt.NDArray[np.int64]:
    """Numbers of a column of names; an empty cell is `none` where that is allowed."""
    coded = chunk.texts(key).dictionary_encode()
    table = np.empty(len(coded.dictionary), np.int64)
    for place, text in enumerate(coded.dictionary.to_pylist()):
        if text:
            table[place] = names.number(text)
        elif empty:
            table[place] = none
        else:
            table[place] = -2
    numbers = table[coded.indices.to_numpy(zero_copy_only=False)]
    if not empty and np.any(numbers == -2):
        row = int(np.argmax(numbers == -2))
        raise TraceError(chunk.place(row), key=key, value="", bound="a name")
    return numbers


def _prefix_lists(chunk: Chunk) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Lengths of the rows' id lists, and all ids one after the other."""
    column = chunk.columns["prefix_ids"]
    if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
        if pa.types.is_null(column.type):
            return np.zeros(len(chunk), np.int64), np.zeros(0, np.int64)
        texts = pc.utf8_trim_whitespace(chunk.texts("prefix_ids"))
        filled = pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts)
        column = pc.split_pattern_regex(filled, r"\s+")
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    flat = column.flatten()
    try:
        if flat.null_count:
            raise pa.ArrowInvalid("an empty id")
        ids = pc.cast(flat, pa.int64()).to_numpy(zero_copy_only=False)
        if len(ids) and ids.min() < 0:
            raise pa.ArrowInvalid("a negative id")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise _bad_id(chunk, column) from None
    return lengths.astype(np.int64), ids


def _bad_id(chunk: Chunk, column: pa.Array) -> TraceError:
    for row, items in enumerate(column.to_pylist()):
        for item in items or ():
            text = str(item)
            if not text.isdecimal() or int(text[:30]) >= 2**63:
                return TraceError(
                    chunk.place(row), key="prefix_ids", value=text[:40], bound="ids of at least 0"
                )
    return TraceError(chunk.file, key="prefix_ids", bound="lists of whole numbers")


def read_canonical_csv(
    path: Path, rng: np.random.Generator, label: Label, options: ReadOptions
) -> Trace:
    """Read Trimtab's CSV form; names are put in natural order.

    Args:
        path: File, plain or gzip.
        rng: Not used: the format leaves nothing to chance.
        label: Not used: the file names tiers and tenants.
        options: Not used.

    Raises:
        TraceError: a cell is not what its column says, or a column is unknown or missing.
    """
    rows = Rows(0, {})
    for chunk in read_chunks(path, wanted=WANTED, optional=OPTIONAL, strict=True):
        rows.add(chunk)
    return with_sorted_names(rows.finish(path.name, ()))


def read_canonical_parquet(
    path: Path, rng: np.random.Generator, label: Label, options: ReadOptions
) -> Trace:
    """Read Trimtab's Parquet form, one record batch at a time.

    Args:
        path: File.
        rng: Not used: the format leaves nothing to chance.
        label: Not used: the file names tiers and tenants.
        options: Not used.

    Raises:
        TraceError: a cell is not what its column says, or a column is unknown or missing.
    """
    with reading(path), pq.ParquetFile(path, pre_buffer=False) as file:
        check_columns(path.name, list(file.schema_arrow.names), WANTED, OPTIONAL, True)
        metadata = _metadata(file.schema_arrow.metadata)
        rows = Rows(min(file.metadata.num_rows, 1 << 24), metadata)
        for chunk in batches(file, path.name):
            rows.add(chunk)
        trace = rows.finish(path.name, tuple(metadata.get("notes", ())))
    return trace if "tier_names" in metadata else with_sorted_names(trace)


def batches(file: pq.ParquetFile, name: str) -> Iterator[Chunk]:
    """The record batches of a Parquet file of this form, named for errors."""
    first = 1
    for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
        columns = {}
        for key, column in zip(batch.schema.names, batch.columns, strict=True):
            plain = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            columns[key] = plain
        yield Chunk(name, "row", first, columns)
        first += batch.num_rows


def _metadata(raw: dict[bytes, bytes] | None) -> dict[str, list[str]]:
    """The names and notes that a file of ours carries; nothing if they are not as we write them."""
    try:
        loaded = json.loads((raw or {}).get(METADATA_KEY, b"{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(loaded, dict):
        return {}
    kept: dict[str, list[str]] = {}
    for key in ("tier_names", "tenant_names", "stop_names", "notes"):
        value = loaded.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            return {}
        if key != "notes" and len(set(value)) != len(value):
            return {}
        kept[key] = value
    return kept if kept["stop_names"][:1] == [""] else {}
