"""The log of an engine's steps, one row a step: what `trimtab calibrate` fits step times to.

Parquet files that rotate and are bounded (`rotating_parquet`). No request, tenant or text is in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trimtab.engine_bridge.media import MEDIA_KINDS
from trimtab.engine_bridge.vllm.rotating_parquet import (
    Limits,
    RotatingParquet,
    json_metadata,
    write_parquet,
)

METADATA_KEY: Final = b"trimtab.steps"
"""Key of a file's metadata: schema, engine, plan_digest, origin_unix_s, dropped_rows, as JSON."""
ENCODED: Final = tuple(f"{kind}_{what}" for kind in MEDIA_KINDS for what in ("items", "tokens"))
"""Columns of what a step encoded: items and their tokens, by kind."""
NOTHING_ENCODED: Final = (0,) * len(ENCODED)
COLUMNS: Final = {
    "time_s": np.float64,
    "step_ms": np.float64,
    "decodes": np.int32,
    "kv_tokens": np.int64,
    "chunks": np.int32,
    "chunk_tokens": np.int32,
    "pairs": np.float64,
    "running": np.int32,
    "waiting": np.int32,
    "kv_used_blocks": np.int32,
    "preempted": np.int32,
    "finished": np.int32,
    **dict.fromkeys(ENCODED, np.int32),
}
"""The columns in order, with their types."""


class _Steps:
    """Preallocated columns that become one file."""

    def __init__(self, rows: int, metadata: Callable[[], dict[bytes, bytes]]) -> None:
        self.columns = [np.empty(rows, kind) for kind in COLUMNS.values()]
        self.rows = 0
        self._metadata = metadata

    def __len__(self) -> int:
        return self.rows

    def table(self) -> pa.Table:
        named: dict[str, npt.NDArray[Any]] = {
            name: column[: self.rows] for name, column in zip(COLUMNS, self.columns, strict=True)
        }
        return pa.table(named).replace_schema_metadata(self._metadata())


class StepLog:
    """Collects steps and hands full buffers to a writer; one thread may call `add`."""

    def __init__(
        self,
        folder: Path | str,
        *,
        engine: str,
        plan_digest: str,
        origin_unix_s: float | None = None,
        rows_per_file: int = 16_384,
        longest_s: float = 300.0,
        limits: Limits | None = None,
        write: Callable[[pa.Table, Path], None] = write_parquet,
    ) -> None:
        """Begin a log.

        Args:
            folder: Where the files go, `steps-*.parquet`.
            engine: Name of the engine, for the files' metadata.
            plan_digest: `Plan.digest`, for the files' metadata.
            origin_unix_s: Wall time at which `time_s` is 0, seconds since 1970; None: now.
            rows_per_file: Most steps in a file; so many are lost at most when the engine dies.
            longest_s: A file is written at the latest when its first step is so old.
            limits: How much may be kept; None: 256 files, 1 GiB.
            write: Writes one table to one path.

        Raises:
            LogFolderError: the folder cannot be written to.
        """
        self._facts = {
            "schema": 1,
            "engine": engine,
            "plan_digest": plan_digest,
            "origin_unix_s": time.time() if origin_unix_s is None else origin_unix_s,
        }
        self._rows, self._longest_s = rows_per_file, longest_s
        self._out = RotatingParquet(Path(folder), "steps", limits=limits, write=write)
        self._ends_s, self._at = 0.0, 0
        self._renew()

    @property
    def dropped_rows(self) -> int:
        """Steps lost since the start, because the disk was slow or full."""
        return self._out.dropped_rows

    @property
    def written_rows(self) -> int:
        """Steps in files since the start."""
        return self._out.written_rows

    def add(
        self,
        time_s: float,
        step_ms: float,
        decodes: int,
        kv_tokens: int,
        chunks: int,
        chunk_tokens: int,
        pairs: float,
        running: int,
        waiting: int,
        kv_used_blocks: int,
        preempted: int,
        finished: int,
        encoded: Sequence[int] = NOTHING_ENCODED,
    ) -> None:
        """Append one step.

        Args:
            time_s: End of the step, seconds from the log's origin.
            step_ms: Its length, milliseconds.
            decodes: Requests that generated a token.
            kv_tokens: Context tokens that those read.
            chunks: Requests that computed part of their prompt.
            chunk_tokens: Prompt tokens computed.
            pairs: Query-key pairs of those chunks.
            running: Requests in the batch after the step.
            waiting: Requests in the queue.
            kv_used_blocks: KV blocks that running requests hold.
            preempted: Requests preempted in the step.
            finished: Requests that ended with the step.
            encoded: Media that the step encoded, as `ENCODED` names them.
        """
        at = self._at
        if at == 0:
            self._ends_s = time_s + self._longest_s
        (c0, c1, c2, c3, c4, c5, c6, c7, c8, c9, c10, c11, *rest) = self._columns
        c0[at], c1[at], c2[at], c3[at] = time_s, step_ms, decodes, kv_tokens
        c4[at], c5[at], c6[at], c7[at] = chunks, chunk_tokens, pairs, running
        c8[at], c9[at], c10[at], c11[at] = waiting, kv_used_blocks, preempted, finished
        for column, count in zip(rest, encoded, strict=True):
            column[at] = count
        self._at = at + 1
        if self._at == self._rows or time_s >= self._ends_s:
            self.flush()

    def flush(self) -> None:
        """Hand what is there to the writer; does not wait for it."""
        self._buffer.rows = self._at
        self._out.put(self._buffer)
        self._renew()

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is there and end the writer."""
        self.flush()
        self._out.close(timeout_s)

    def _renew(self) -> None:
        self._buffer = _Steps(self._rows, self._metadata)
        self._columns = self._buffer.columns
        self._at = 0

    def _metadata(self) -> dict[bytes, bytes]:
        facts = self._facts | {"dropped_rows": self._out.dropped_rows}
        return json_metadata(METADATA_KEY, facts)
