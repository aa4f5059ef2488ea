"""Which prompt tokens of a trace a prefix cache of finite size still holds, without a replay.

A mean-field estimate of a least-recently-used cache (the "characteristic time" of Che, Tung and
Wang 2002): content survives for one common time after its last use, and that time is where the
content so held fills the cache on average. It is vectorised over the trace; it evicts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.trace import Trace

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

_HALVINGS = 40
_NOWHERE = -1


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """What each request of a trace finds in a cache that forgets nothing."""

    cached_tokens: LongArray
    """Leading prompt tokens that an earlier request has left behind, shape (n,)."""
    source: LongArray
    """The last earlier row that used them, -1 = none, shape (n,)."""


def find_reuse(trace: Trace) -> Reuse:
    """Match prefix ids with those of earlier rows.

    Ids beyond a prompt are left behind but not used, and the last token of a prompt is never taken
    from the cache: an engine must compute it to get an answer.
    """
    n, ids, offsets = len(trace), trace.prefix_ids, trace.prefix_offsets
    source = np.full(n, _NOWHERE, np.int64)
    if not len(ids):
        return Reuse(cached_tokens=np.zeros(n, np.int64), source=source)
    counts = np.diff(offsets)
    row = np.repeat(np.arange(n, dtype=np.int32), counts)
    first = np.empty(int(ids.max()) + 1, np.int32)
    first[ids[::-1]] = row[::-1]
    blocks = trace.prefix_block_tokens.astype(np.int64)
    usable = np.minimum(counts, (trace.prompt_tokens - 1) // np.maximum(blocks, 1))
    place = np.arange(len(ids)) - np.repeat(offsets[:-1], counts)
    hit = (first[ids] < row) & (place < np.repeat(usable, counts))
    hits = np.bincount(row[hit], minlength=n)
    takers = np.flatnonzero(hits)
    source[takers] = _previous_row(ids, row, offsets[takers] + hits[takers] - 1)
    return Reuse(cached_tokens=hits * blocks, source=source)


def kept_tokens(
    trace: Trace, reuse: Reuse, *, asked_s: FloatArray, service_s: FloatArray, cache_tokens: float
) -> LongArray:
    """Prompt tokens of each request that a finite cache still holds when it is asked for.

    Args:
        trace: the traffic.
        reuse: what a cache that forgets nothing would hold.
        asked_s: when each request is asked for, seconds, shape (n,).
        service_s: how long each is served, seconds, shape (n,); meanwhile its context is held.
        cache_tokens: size of the cache, running requests included.

    Returns:
        Tokens, shape (n,).
    """
    takers = np.flatnonzero(reuse.cached_tokens)
    if not len(takers):
        return reuse.cached_tokens
    source = reuse.source[takers]
    gap_s = np.maximum(asked_s[takers] - asked_s[source] - service_s[source], 0.0)
    next_s = np.full(len(trace), np.inf)
    np.minimum.at(next_s, source, gap_s)
    taken = np.zeros(len(trace), np.int64)
    np.maximum.at(taken, source, reuse.cached_tokens[takers])
    context = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    taken = np.minimum(taken, context)
    span_s = float(asked_s.max() + service_s[np.argmax(asked_s)])

    def held_tokens(keep_s: float) -> float:
        again = taken * np.minimum(next_s, keep_s)
        return float((context * service_s + again + (context - taken) * keep_s).sum()) / span_s

    short_s, long_s = 0.0, span_s
    for _ in range(_HALVINGS if held_tokens(long_s) > cache_tokens else 0):
        keep_s = (short_s + long_s) / 2
        fits = held_tokens(keep_s) <= cache_tokens
        short_s, long_s = (keep_s, long_s) if fits else (short_s, keep_s)
    kept = reuse.cached_tokens.copy()
    kept[takers[gap_s > long_s]] = 0
    return kept


def _previous_row(
    ids: npt.NDArray[np.int32], row: npt.NDArray[np.int32], places: LongArray
) -> LongArray:
    """The last row before each place's own that holds the id at that place."""
    wanted = np.zeros(int(ids.max()) + 1, np.bool_)
    wanted[ids[places]] = True
    occurrences = np.flatnonzero(wanted[ids])
    by_id = np.argsort(ids[occurrences], kind="stable")
    rank = np.empty(len(by_id), np.int64)
    rank[by_id] = np.arange(len(by_id))
    before = by_id[rank[np.searchsorted(occurrences, places)] - 1]
    return row[occurrences[before]].astype(np.int64)
