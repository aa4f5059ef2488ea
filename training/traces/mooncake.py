"""Read Mooncake's traces (JSON lines with prefix-block ids). It invents no users or sessions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.assemble import Column, build_sorted, dense_ids, offsets_of
from trimtab.training.traces.json_fields import json_ids, json_integer, json_number
from trimtab.training.traces.options import Label, ReadOptions
from trimtab.training.traces.source import JsonObject, json_lines
from trimtab.training.traces.table import LONGEST_S

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
BLOCK_TOKENS = 512
BATCH_S = 3.0
_NEAR_S = 0.005
_BATCHED_FRACTION = 0.95
_FLUSH_ROWS = 4096


def read_mooncake(
    path: Path, rng: np.random.Generator, label: Label, options: ReadOptions
) -> Trace:
    """Read one JSON-lines file; times count from its earliest row.

    Stamps of the conversation trace are batched every 3 s: there each request is spread over the
    3 s of its batch. The last id of a prompt that does not fill its block is left out, because a
    cache can only reuse full blocks.

    Args:
        path: File, plain or gzip.
        rng: Where in its batch a request arrives.
        label: Tier and tenant of every row.
        options: Not used.

    Raises:
        TraceError: a line is not what the format says.
    """
    times_ms = Column(np.float64)
    prompt, output, full = Column(np.int32), Column(np.int32), Column(np.int64)
    ids = Column(np.int64)
    rows: list[tuple[float, int, int, int]] = []
    flat: list[int] = []

    def flush() -> None:
        for column, values in zip(
            (times_ms, prompt, output, full), zip(*rows, strict=True), strict=True
        ):
            column.extend(values)
        ids.extend(np.array(flat, np.int64))
        rows.clear()
        flat.clear()

    for number, record in json_lines(path):
        rows.append(_row(record, f"{path.name} line {number}", flat))
        if len(rows) >= _FLUSH_ROWS:
            flush()
    if rows:
        flush()
    if not len(times_ms):
        raise TraceError(path.name, remedy="the file has no rows")
    return _build(path.name, times_ms, prompt, output, full, ids, rng, label)


def _row(record: JsonObject, where: str, flat: list[int]) -> tuple[float, int, int, int]:
    for name in FIELDS:
        if name not in record:
            raise TraceError(where, key=name, remedy="the field is missing")
    stamp = json_number(record, "timestamp", where, low=0, high=LONGEST_S * 1e3)
    prompt = json_integer(record, "input_length", where, low=1)
    output = json_integer(record, "output_length", where, low=1)
    ids = json_ids(record, "hash_ids", where)
    blocks = -(-prompt // BLOCK_TOKENS)
    if len(ids) > blocks:
        raise TraceError(
            where,
            key="hash_ids",
            value=f"{len(ids)} ids",
            bound=f"at most {blocks}, one a block of {BLOCK_TOKENS} tokens",
        )
    full = min(len(ids), prompt // BLOCK_TOKENS)
    flat.extend(ids[:full])
    return stamp, prompt, output, full


def _build(
    name: str,
    times_ms: Column,
    prompt: Column,
    output: Column,
    full: Column,
    ids: Column,
    rng: np.random.Generator,
    label: Label,
) -> Trace:
    # Subtracted while still whole milliseconds, so that 0.1 s stays 0.1 s.
    stamps_ms = times_ms.finish()
    arrival = (stamps_ms - stamps_ms.min()) / 1e3
    notes: tuple[str, ...] = ()
    if batched(arrival):
        arrival = spread_batches(arrival, rng)
        notes = (f"{name}: stamps batched every {BATCH_S:g} s are spread over their batch.",)
    lengths = full.finish()
    return build_sorted(
        name,
        arrival_s=arrival,
        prompt_tokens=prompt.finish(),
        output_tokens=output.finish(),
        tier_names=(label.tier,),
        tenant_names=(label.tenant,),
        prefix_offsets=offsets_of(lengths),
        prefix_ids=dense_ids(ids.finish()),
        prefix_block_tokens=np.where(lengths > 0, BLOCK_TOKENS, 0).astype(np.int32),
        notes=notes,
    )


def spread_batches(
    arrival_s: npt.NDArray[np.float64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Spread each batch uniformly over its 3 s, in the order of the file; starts at 0 again."""
    batch = np.round(arrival_s / BATCH_S).astype(np.int64)
    shift = rng.uniform(0.0, BATCH_S, len(arrival_s))
    by_row = np.argsort(batch, kind="stable")
    by_shift = np.lexsort((shift, batch))
    spread = np.empty_like(arrival_s)
    # Sorted shifts inside a batch keep the file's order, which may be the order of arrival.
    spread[by_row] = batch[by_row] * BATCH_S + shift[by_shift]
    return spread - spread.min()


def batched(arrival_s: npt.NDArray[np.float64]) -> bool:
    """Whether stamps stand on a 3 s grid (to 5 ms), as those of a log that is flushed every 3 s."""
    if len(arrival_s) < 2 or float(arrival_s.max()) < BATCH_S / 2:
        return False
    off = np.abs((arrival_s + BATCH_S / 2) % BATCH_S - BATCH_S / 2)
    return bool(np.mean(off <= _NEAR_S) >= _BATCHED_FRACTION)
