"""Prefix reuse of a trace: who finds what, and how long a finite cache keeps it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimtab.engine_bridge.cache_reach import find_reuse, kept_tokens
from trimtab.engine_bridge.trace import Trace


def _with_prefixes(block_tokens: int, prompts: list[int], ids: list[list[int]]) -> Trace:
    offsets = np.cumsum([0, *(len(row) for row in ids)])
    return Trace.build(
        arrival_s=np.arange(len(prompts), dtype=np.float64),
        prompt_tokens=prompts,
        output_tokens=10,
        prefix_offsets=offsets.astype(np.int64),
        prefix_ids=np.array([i for row in ids for i in row], np.int32),
        prefix_block_tokens=np.full(len(prompts), block_tokens, np.int32),
    )


def _kept(trace: Trace, cache_tokens: float) -> list[int]:
    kept = kept_tokens(
        trace,
        find_reuse(trace),
        asked_s=trace.arrival_s,
        service_s=np.full(len(trace), 0.1),
        cache_tokens=cache_tokens,
    )
    return kept.tolist()


def test_prefixes_seen_before_are_found() -> None:
    trace = _with_prefixes(16, [40, 40, 64, 8], [[0, 1], [0, 1], [0, 2, 3, 4], []])
    reuse = find_reuse(trace)
    assert reuse.cached_tokens.tolist() == [0, 32, 16, 0]
    assert reuse.source.tolist() == [-1, 0, 1, -1]


def test_the_last_prompt_token_is_never_taken_from_the_cache() -> None:
    trace = _with_prefixes(16, [32, 32], [[0, 1], [0, 1]])
    assert find_reuse(trace).cached_tokens.tolist() == [0, 16]


def test_ids_beyond_the_prompt_are_left_behind_but_not_used() -> None:
    trace = _with_prefixes(16, [16, 16, 60], [[0, 1, 2], [0, 1, 2], [0, 1, 2]])
    assert find_reuse(trace).cached_tokens.tolist() == [0, 0, 48]


def test_without_ids_nothing_is_found() -> None:
    trace = _with_prefixes(0, [10, 10], [[], []])
    assert find_reuse(trace).cached_tokens.tolist() == [0, 0]
    assert _kept(trace, 100.0) == [0, 0]


def test_a_large_cache_keeps_everything_and_a_small_one_what_comes_back_soon() -> None:
    # Rows 0 and 1 share a prompt at once; row 5 repeats row 2 after three other prompts.
    blocks = [[0, 1], [0, 1], [2, 3], [4, 5], [6, 7], [2, 3], [8, 9]]
    trace = _with_prefixes(100, [250] * 7, blocks)
    assert _kept(trace, 1e9) == [0, 200, 0, 0, 0, 200, 0]
    assert _kept(trace, 500.0) == [0, 200, 0, 0, 0, 0, 0]
    assert _kept(trace, 1.0) == [0, 0, 0, 0, 0, 0, 0]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=12),
    st.floats(1.0, 1e4),
)
def test_reuse_matches_a_plain_count(paths: list[list[int]], cache_tokens: float) -> None:
    names: dict[tuple[int, ...], int] = {}
    ids = [
        [names.setdefault(tuple(path[: k + 1]), len(names)) for k in range(len(path))]
        for path in paths
    ]
    trace = _with_prefixes(16, [16 * 4 + 1] * len(ids), ids)
    last: dict[int, int] = {}
    for row, (chain, found, source) in enumerate(
        zip(ids, *map(np.ndarray.tolist, vars(find_reuse(trace)).values()), strict=True)
    ):
        known = [i for i in chain if i in last]
        assert found == 16 * len(known)
        assert source == (last[known[-1]] if known else -1)
        last.update(dict.fromkeys(chain, row))
    kept = _kept(trace, cache_tokens)
    assert all(0 <= k <= f for k, f in zip(kept, find_reuse(trace).cached_tokens, strict=True))
