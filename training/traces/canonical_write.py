"""Write traces in Trimtab's own form, Parquet or CSV by suffix, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from trimtab.engine_bridge.errors import FlagError, TraceError
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.training.traces.canonical import METADATA_KEY
from trimtab.training.traces.media_column import KEY as MEDIA
from trimtab.training.traces.media_column import media_texts

SUFFIXES = (".parquet", ".csv")
_WRITE_ROWS = 262_144


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace; reading it back gives the same digest.

    A CSV file holds no table of names: reading puts them in natural order, which is the order of
    every trace that this package makes. Columns that say nothing are left out.

    Args:
        trace: What to write.
        path: Ends in `.parquet` or `.csv`. An existing file is replaced only when all is written.

    Raises:
        TraceError: the suffix is another one, or the file cannot be written.
    """
    check_out(path)
    with replacing(path) as partial:
        if path.suffix == ".parquet":
            _write_parquet(trace, partial)
        else:
            _write_csv(trace, partial)


def check_out(path: Path) -> None:
    """Refuse a path that a trace cannot be written to, before work is done for it.

    Raises:
        TraceError: the suffix is not known, the folder is missing, or the path is a folder.
    """
    if path.suffix not in SUFFIXES:
        raise TraceError(str(path), value=path.suffix, bound="a name that ends in .parquet or .csv")
    if path.is_dir():
        raise TraceError(str(path), remedy="it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise TraceError(str(path), remedy=f"make the folder {path.parent} first")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file beside `path` that takes its place if all goes well.

    Raises:
        TraceError: the folder or file cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
        os.close(handle)
    except OSError as fault:
        raise TraceError(
            f"{path}: cannot be written: {fault.strerror or fault}",
            remedy="choose another place or make room",
        ) from fault
    partial = Path(name)
    try:
        yield partial
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o666 & ~mask)
        partial.replace(path)
    except OSError as fault:
        raise TraceError(
            f"{path}: cannot be written: {fault.strerror or fault}",
            remedy="choose another place or make room",
        ) from fault
    finally:
        partial.unlink(missing_ok=True)


def check_json_out(path: Path) -> None:
    """Refuse a path that a summary cannot be written to.

    Raises:
        FlagError: the folder is missing, or the path is a folder.
    """
    if path.is_dir():
        raise FlagError("--json", value=str(path), remedy="it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise FlagError("--json", value=str(path), remedy=f"make the folder {path.parent} first")


def write_json(summary: dict[str, Any], path: Path) -> None:
    """Write a summary, whole or not at all.

    Raises:
        TraceError: the file cannot be written.
    """
    with replacing(path) as partial:
        partial.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")


def _write_parquet(trace: Trace, path: Path) -> None:
    names = {
        "tier_names": trace.tier_names,
        "tenant_names": trace.tenant_names,
        "stop_names": trace.stop_names,
        "notes": trace.notes,
    }
    writer: pq.ParquetWriter | None = None
    keep = _informative(trace)
    try:
        for start in range(0, max(len(trace), 1), _WRITE_ROWS):
            batch = _batch(trace, slice(start, start + _WRITE_ROWS), keep)
            if writer is None:
                schema = batch.schema.with_metadata({METADATA_KEY: json.dumps(names).encode()})
                writer = pq.ParquetWriter(path, schema, compression="zstd")
            writer.write_batch(batch.replace_schema_metadata(schema.metadata))
    finally:
        if writer is not None:
            writer.close()


def _write_csv(trace: Trace, path: Path) -> None:
    for name in (*trace.tier_names, *trace.tenant_names, *trace.stop_names):
        if "\n" in name or "\r" in name:
            raise TraceError("trace", value=name, bound="a name of one line, or a .parquet file")
    keep = _informative(trace)
    writer: pacsv.CSVWriter | None = None
    try:
        for start in range(0, max(len(trace), 1), _WRITE_ROWS):
            batch = _flat(_batch(trace, slice(start, start + _WRITE_ROWS), keep))
            if writer is None:
                options = pacsv.WriteOptions(quoting_style="needed")
                writer = pacsv.CSVWriter(path, batch.schema, write_options=options)
            writer.write_batch(batch)
    finally:
        if writer is not None:
            writer.close()


def _informative(trace: Trace) -> frozenset[str]:
    """The optional columns that say something."""
    says = {
        "session": np.any(trace.session != NO_SESSION),
        "think_s": np.any(trace.think_s != 0),
        "prefix_ids": len(trace.prefix_ids) > 0,
        "cancel_after_s": np.any(np.isfinite(trace.cancel_after_s)),
        "stop_reason": np.any(trace.stop_reason != 0),
        MEDIA: len(trace.media) > 0,
        "acceptance": not np.all(np.isnan(trace.acceptance)),
    }
    if says["session"]:
        says["turn"] = says["think_s"] = True
    if says["prefix_ids"]:
        says["prefix_block_tokens"] = True
    return frozenset(name for name, something in says.items() if something)


def _batch(trace: Trace, rows: slice, keep: frozenset[str]) -> pa.RecordBatch:
    session = trace.session[rows]
    cancel = trace.cancel_after_s[rows]
    acceptance = trace.acceptance[rows]
    columns: dict[str, Any] = {
        "arrival_s": pa.array(trace.arrival_s[rows]),
        "tenant": _texts(trace.tenant[rows], trace.tenant_names),
        "tier": _texts(trace.tier[rows], trace.tier_names),
        "prompt_tokens": pa.array(trace.prompt_tokens[rows]),
        "output_tokens": pa.array(trace.output_tokens[rows]),
        "session": pa.array(session, mask=session == NO_SESSION),
        "turn": pa.array(trace.turn[rows]),
        "think_s": pa.array(trace.think_s[rows]),
        "prefix_ids": _lists(trace, rows),
        "prefix_block_tokens": pa.array(trace.prefix_block_tokens[rows]),
        "cancel_after_s": pa.array(cancel, mask=~np.isfinite(cancel)),
        "stop_reason": _texts(trace.stop_reason[rows], trace.stop_names),
        "acceptance": pa.array(acceptance, mask=np.isnan(acceptance)),
    }
    if MEDIA in keep:
        first, beyond, _ = rows.indices(len(trace))
        columns[MEDIA] = media_texts(trace.media, first, beyond)
    always = ("arrival_s", "tenant", "tier", "prompt_tokens", "output_tokens")
    return pa.RecordBatch.from_pydict(
        {name: column for name, column in columns.items() if name in always or name in keep}
    )


def _texts(numbers: npt.NDArray[np.int32], names: tuple[str, ...]) -> pa.Array:
    coded = pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(names, pa.string()))
    return coded.dictionary_decode()


def _lists(trace: Trace, rows: slice) -> pa.Array:
    start, stop, _ = rows.indices(len(trace))
    offsets = trace.prefix_offsets[start : stop + 1]
    ids = trace.prefix_ids[offsets[0] : offsets[-1]]
    return pa.LargeListArray.from_arrays(pa.array(offsets - offsets[0]), pa.array(ids))


def _flat(batch: pa.RecordBatch) -> pa.RecordBatch:
    """CSV has no lists: what they hold becomes text, separated by blanks."""
    for name in ("prefix_ids", MEDIA):
        if name in batch.schema.names:
            at = batch.schema.get_field_index(name)
            lists = batch.column(at)
            texts = pa.LargeListArray.from_arrays(lists.offsets, pc.cast(lists.values, pa.string()))
            batch = batch.set_column(at, name, pc.binary_join(texts, " "))
    return batch
