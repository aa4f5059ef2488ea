"""Reads logs of an engine's steps into the table that a fit takes.

Two forms: CSV with columns `step.*`, `batch.*` and `kv.*` (a sample of the steps of an instrumented
vLLM), and Parquet with Trimtab's own columns. It fits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from trimtab.engine_bridge.errors import TableError
from trimtab.engine_bridge.media import MEDIA_KINDS
from trimtab.training.calibration.table import FloatArray, StepTable

OWN_COLUMNS: Final = ("step_ms", "decodes", "kv_tokens", "chunks", "chunk_tokens", "pairs")
"""Columns that a fit needs of Trimtab's own step log; it has more."""
ENCODED_COLUMNS: Final = tuple(
    f"{kind}_{what}" for kind in MEDIA_KINDS for what in ("items", "tokens")
)
"""Columns of what a step encoded; older logs lack them and encoded nothing."""
SAMPLED_COLUMNS: Final = (
    "step.id",
    "step.ts_start_ns",
    "queue.running_depth",
    "batch.num_prefill_reqs",
    "batch.num_decode_reqs",
    "batch.prefill_tokens",
    "kv.usage_gpu_ratio",
    "kv.blocks_total_gpu",
)
_LARGEST_GAP: Final = 3
_LONGEST_MS: Final = 5_000.0
_BLOCK_TOKENS: Final = 16
_OUTLIER: Final = 3.0


@dataclass(frozen=True, kw_only=True)
class StepLog:
    """Steps of one engine, and the KV blocks that the log names (0: it names none)."""

    table: StepTable
    """Steps that encoded nothing: their times are the language model's."""
    encoding: StepTable
    """Steps that encoded media besides: m of them."""
    encoded: FloatArray
    """What those encoded, as `ENCODED_COLUMNS` names it, shape (m, 2 x kinds)."""
    num_gpu_blocks: int = 0


def read_step_log(path: Path) -> StepLog:
    """Read one log; the columns tell its form.

    Raises:
        TableError: it cannot be read, is in neither form, or has no usable step.
    """
    try:
        parquet = path.suffix == ".parquet"
        table = pd.read_parquet(path) if parquet else pd.read_csv(path)
    except (OSError, ValueError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise TableError(str(path), value=reason, bound="a step log, CSV or Parquet") from None
    own = "step_ms" in table.columns
    wanted: tuple[str, ...] = OWN_COLUMNS if own else SAMPLED_COLUMNS
    missing = [name for name in wanted if name not in table.columns]
    if missing:
        raise TableError(
            str(path),
            key=missing[0],
            value="missing column",
            bound="in the log",
            remedy=f"needed are {', '.join(OWN_COLUMNS)} or {', '.join(SAMPLED_COLUMNS)}",
        )
    if own:
        wanted = (*OWN_COLUMNS, *(name for name in ENCODED_COLUMNS if name in table.columns))
    numbers = table[list(wanted)].apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
    bad = ~np.isfinite(numbers).all(axis=1) | (numbers < 0).any(axis=1)
    if bad.any():
        row = int(np.argmax(bad))
        column = wanted[int(np.argmax(~np.isfinite(numbers[row]) | (numbers[row] < 0)))]
        value = table[column].iloc[row]
        raise TableError(
            f"{path} row {row + 2}", key=column, value=str(value), bound="a number of at least 0"
        )
    columns = {name: numbers[:, place] for place, name in enumerate(wanted)}
    log = _own(columns) if own else _sampled(columns)
    if not len(log.table) and not len(log.encoding):
        raise TableError(str(path), value="no usable step", bound="steps that follow one another")
    return replace(log, table=replace(log.table, sources=(path.name,)))


def joined(logs: Sequence[StepLog]) -> StepLog:
    """The steps of several logs as one."""
    return StepLog(
        table=_together([log.table for log in logs]),
        encoding=_together([log.encoding for log in logs]),
        encoded=np.concatenate([log.encoded for log in logs]),
        num_gpu_blocks=min((log.num_gpu_blocks for log in logs if log.num_gpu_blocks), default=0),
    )


def _together(tables: Sequence[StepTable]) -> StepTable:
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(table, name) for table in tables])
        for name, value in vars(tables[0]).items()
        if isinstance(value, np.ndarray)
    }
    sources = tuple(source for table in tables for source in table.sources)
    return replace(tables[0], sources=sources, **arrays)


def _own(columns: dict[str, FloatArray]) -> StepLog:
    keep = (columns["step_ms"] > 0) & (columns["step_ms"] < _LONGEST_MS)
    keep &= columns["decodes"] + columns["chunk_tokens"] > 0
    nothing = np.zeros(len(keep))
    encoded = np.stack([columns.get(name, nothing) for name in ENCODED_COLUMNS], axis=1)
    encodes = encoded.any(axis=1)
    plain, encoding = (
        _table(*(columns[name][keep & chosen] for name in OWN_COLUMNS))
        for chosen in (~encodes, encodes)
    )
    return StepLog(table=plain, encoding=encoding, encoded=encoded[keep & encodes])


def _sampled(columns: dict[str, FloatArray]) -> StepLog:
    """Periods between sampled steps at most 3 apart, with the mean of the two steps' batches.

    The log's own duration is only a CPU part of the step. Pairs with prefill between them count
    only if nothing lies between; pairs over an idle gap are left out.
    """
    order = np.argsort(columns["step.id"], kind="stable")
    sorted_columns = {name: values[order] for name, values in columns.items()}
    gap = np.diff(sorted_columns["step.id"])
    start_ms = sorted_columns["step.ts_start_ns"] * 1e-6
    period = np.diff(start_ms) / np.maximum(gap, 1.0)
    total = sorted_columns["kv.blocks_total_gpu"]
    used = sorted_columns["kv.usage_gpu_ratio"] * total * _BLOCK_TOKENS
    mean = {
        name: 0.5 * (sorted_columns[name][1:] + sorted_columns[name][:-1])
        for name in SAMPLED_COLUMNS
    }
    kv_tokens = 0.5 * (used[1:] + used[:-1])
    chunk_tokens, chunks = mean["batch.prefill_tokens"], mean["batch.num_prefill_reqs"]
    chunks = np.where(chunk_tokens > 0, np.maximum(chunks, 0.5), 0.0)
    decodes = mean["batch.num_decode_reqs"]
    steady = np.abs(np.diff(sorted_columns["batch.num_decode_reqs"])) <= 0.25 * decodes + 1.0
    keep = (gap >= 1) & (gap <= _LARGEST_GAP) & steady & (decodes + chunk_tokens > 0)
    keep &= (chunk_tokens == 0) | (gap == 1)
    keep &= period < _LONGEST_MS
    if keep.any():
        keep &= period < _OUTLIER * np.median(period[keep])
    pairs = np.where(chunks > 0, chunk_tokens * chunk_tokens / np.maximum(2 * chunks, 1.0), 0.0)
    table = _table(
        period[keep],
        decodes[keep],
        kv_tokens[keep],
        chunks[keep],
        chunk_tokens[keep],
        pairs[keep],
    )
    return StepLog(
        table=table,
        encoding=table.take(np.zeros(0, np.int64)),
        encoded=np.zeros((0, len(ENCODED_COLUMNS))),
        num_gpu_blocks=int(total.max()) if len(total) else 0,
    )


def _table(
    step_ms: FloatArray,
    decodes: FloatArray,
    kv_tokens: FloatArray,
    chunks: FloatArray,
    chunk_tokens: FloatArray,
    pairs: FloatArray,
) -> StepTable:
    unknown = np.full(len(step_ms), np.nan)
    region = np.where(chunk_tokens > 0, np.where(decodes > 0, 2, 1), 0)
    return StepTable(
        region=region.astype(np.int8),
        tokens=decodes + chunk_tokens,
        sequences=decodes + chunks,
        chunks=chunks,
        chunk_tokens=chunk_tokens,
        pairs=pairs,
        requests=decodes,
        kv_tokens=kv_tokens,
        iter_ms=step_ms,
        nonattn_ms=unknown,
        prefill_attn_ms=unknown,
        decode_attn_ms=unknown,
        allreduce_ms=unknown,
    )
