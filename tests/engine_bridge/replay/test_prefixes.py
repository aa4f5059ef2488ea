"""Prefix runs: what they merge, what they leave out, and that the replay does not notice."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine_bridge.replay.workloads import random_trace
from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.replay.prefixes import find_runs
from trimtab.engine_bridge.trace import Trace


def trace_of(*rows: list[int], tokens: int = 16) -> Trace:
    lengths = [len(row) for row in rows]
    return Trace.build(
        arrival_s=np.arange(len(rows), dtype=float),
        prompt_tokens=[max(1, n * tokens) for n in lengths],
        output_tokens=1,
        prefix_offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        prefix_ids=np.array([i for row in rows for i in row], np.int32),
        prefix_block_tokens=np.full(len(rows), tokens, np.int32),
    )


def runs(trace: Trace, block_size: int = 16) -> list[list[tuple[int, int]]]:
    """Each row's runs as numbers of blocks, with equal content numbered equally."""
    found = find_runs(trace, block_size)
    ends = zip(found.offsets[:-1], found.offsets[1:], strict=True)
    return [[(int(i), int(found.blocks[i])) for i in found.ids[a:b]] for a, b in ends]


def test_ids_that_always_come_together_are_one_run() -> None:
    first, second = runs(trace_of([0, 1, 2, 3], [0, 1, 2, 3]))
    assert first == second
    assert [blocks for _, blocks in first] == [4]


def test_a_branch_ends_a_run() -> None:
    first, second, third = runs(trace_of([0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 2, 3]))
    assert [blocks for _, blocks in first] == [2, 2]
    assert [blocks for _, blocks in second] == [2]
    assert first[0] == second[0] == third[0]


def test_what_nobody_shares_is_left_out_only_at_the_end() -> None:
    assert runs(trace_of([0, 1], [2, 3])) == [[], []]
    first, second = runs(trace_of([7, 0, 1], [0, 1]))
    assert [blocks for _, blocks in first] == [1, 2]
    assert [blocks for _, blocks in second] == [2]


def test_fine_ids_are_thinned_to_engine_blocks() -> None:
    first, second = runs(trace_of([0, 1, 2, 3, 4], [0, 1, 2, 3, 5], tokens=8))
    assert first == second
    assert [blocks for _, blocks in first] == [2]


def test_coarse_ids_cover_several_blocks() -> None:
    first, _ = runs(trace_of([0, 1], [0, 1], tokens=64))
    assert [blocks for _, blocks in first] == [8]


def test_ids_that_do_not_line_up_with_blocks_are_refused() -> None:
    with pytest.raises(TraceError, match="prefix_block_tokens: 24"):
        find_runs(trace_of([0], [0], tokens=24), 16)


def test_every_shared_block_of_a_random_trace_stays_findable() -> None:
    trace = random_trace(11, requests=80)
    found = find_runs(trace, 16)
    seen = np.bincount(trace.prefix_ids)
    for row in range(len(trace)):
        ids = trace.prefix_ids[trace.prefix_offsets[row] : trace.prefix_offsets[row + 1]]
        shared = np.flatnonzero(seen[ids] > 1)
        want = (int(shared.max()) + 1) * 4 if len(shared) else 0
        got = found.blocks[found.ids[found.offsets[row] : found.offsets[row + 1]]].sum()
        assert got >= want
