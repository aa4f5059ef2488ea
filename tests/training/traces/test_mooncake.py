"""Mooncake's traces: batches of 3 s, milliseconds, full blocks only."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from .conftest import Read, Write


def _lines(rows: list[tuple[int, int, int, list[int]]]) -> str:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return "\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows)


BATCHED = [(stamp, 600, 1, [7, 900 + stamp]) for stamp in (0, 0, 0, 2999, 3000, 3001, 6000, 9001)]


def test_batches_are_spread_over_their_three_seconds(write: Write, read: Read) -> None:
    path = write("a.jsonl", _lines(BATCHED))
    trace = read(path)
    assert "spread over their batch" in trace.notes[0]
    assert trace.arrival_s[0] == 0
    assert np.all(np.diff(trace.arrival_s) > 0)
    # The start moves by less than a batch, so the counts a batch stay within one.
    batch = np.bincount(((trace.arrival_s + 1.5) // 3).astype(np.int64))
    assert batch.sum() == 8
    assert read(path).digest() == trace.digest()
    assert read(path, seed=1).digest() != trace.digest()


def test_stamps_off_the_grid_are_kept(write: Write, read: Read) -> None:
    rows = [(stamp, 600, 5, [1, 2]) for stamp in (5, 105, 105, 1805, 4005)]
    trace = read(write("a.jsonl", _lines(rows)))
    assert trace.arrival_s.tolist() == [0.0, 0.1, 0.1, 1.8, 4.0]
    assert trace.notes == ()


def test_a_partly_filled_last_block_is_no_block(write: Write, read: Read) -> None:
    rows = [(0, 1024, 5, [4, 9]), (100, 1025, 5, [4, 9, 11]), (200, 100, 1, [12])]
    trace = read(write("a.jsonl.gz", _lines(rows)))
    assert np.diff(trace.prefix_offsets).tolist() == [2, 2, 0]
    assert trace.prefix_ids.tolist() == [0, 1, 0, 1]
    assert trace.prefix_block_tokens.tolist() == [512, 512, 0]


@pytest.mark.parametrize(
    ("name", "rows", "reusable"), [("conversation", 7389, 0.35), ("synthetic", 3993, 0.65)]
)
def test_the_real_traces(
    shared_dir: Path, read: Read, name: str, rows: int, reusable: float
) -> None:
    from trimtab.training.traces.describe import describe

    trace = read(shared_dir / f"traces/mooncake-fast25/{name}_trace.jsonl.gz")
    found = describe(trace)
    assert found["rows"] == rows
    assert found["reusable_prompt_share"] == pytest.approx(reusable, abs=0.02)
    assert bool(trace.notes) == (name == "conversation")
    # Once spread, the conversation is near Poisson inside a batch.
    gaps = np.diff(trace.arrival_s)
    assert 0.9 < gaps.std() / gaps.mean() < 1.3
