"""Long prompts in slices, as the gateway would send them, for a run of the replay.

A request over its tier's `slice_tokens` becomes turns of a closed loop: growing prefixes with one
output token, then itself. Which of them an engine gets is decided when it arrives there
(`replay.slices`). `fold` puts the rows of the run back together, so that all figures are about the
requests of the trace. The cuts themselves are `engine_bridge.slicing`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.slicing import ALIGN_TOKENS, cuts
from trimtab.engine_bridge.trace import NO_SESSION, NO_SLICE, Trace

IntArray = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[np.generic]]

TRIP_S_PER_TOKEN = 1e-6
"""What sending a slice takes before the engine has it, per token of its prefix: reading the ids,
hashing their blocks (docs/slicing.md)."""
_OF_FIRST = ("arrival_s", "admitted_s")
_SUMS = {"preemptions", "recomputed_tokens", "service_ms"}


@dataclass(frozen=True)
class Sliced:
    """A trace in slices, and how its rows belong together."""

    trace: Trace
    first: IntArray
    """Row of each request's first slice, its own where it has none, shape (requests,)."""
    last: IntArray
    """Row of the request itself, likewise."""

    @cached_property
    def request(self) -> IntArray:
        """Request of each row, shape (rows,)."""
        return np.repeat(np.arange(len(self.last)), self.last - self.first + 1)

    def fold(self, rows: Mapping[str, npt.NDArray[Any]]) -> Columns:
        """The columns of a run with one row a request of the trace as it was.

        A request arrives with the first slice that its engine got and ends by itself; preemptions,
        recomputed tokens and engine time are sums. What its slices computed does not count as
        cached.
        """
        if len(self.trace) == len(self.last):
            return dict(rows)
        folded: Columns = {name: column[self.last] for name, column in rows.items()}
        for name in _OF_FIRST:
            folded[name] = np.fmin.reduceat(rows[name], self.first)
        for name in _SUMS & rows.keys():
            folded[name] = np.add.reduceat(rows[name], self.first).astype(rows[name].dtype)
        folded["cached_tokens"] = self._cached(rows).astype(rows["cached_tokens"].dtype)
        return folded

    def _cached(self, rows: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
        """Tokens that each request would have found cached without its slices.

        What the first slice that computed more than its last block had found; where none did, what
        the request itself has.
        """
        found = np.asarray(rows["cached_tokens"], np.float64)
        fresh = np.asarray(rows["prompt_tokens"], np.float64) - found > ALIGN_TOKENS
        fresh &= np.isfinite(rows["admitted_s"])
        fresh[self.last] = True
        rows_of_fresh = np.where(fresh, np.arange(len(fresh)), self.last[self.request])
        first = np.minimum.reduceat(rows_of_fresh, self.first)
        return np.minimum(found[first], found[self.last])


def in_slices(trace: Trace, plan: Plan, spec: EngineSpec) -> Sliced:
    """The trace as the engine meets it behind a gateway with this plan.

    A request stays whole if it could never fit the cache, if it holds media, or if its client gives
    up: nobody knows when its slices would arrive.
    """
    ends = _ends(trace, plan, spec)
    rows = np.arange(len(trace))
    if not any(len(one) for one in ends):
        return Sliced(trace, rows, rows)
    count = np.array([len(one) + 1 for one in ends])
    of = np.repeat(rows, count)
    last = np.cumsum(count) - 1
    first = last - count + 1
    number = np.arange(len(of)) - first[of]
    prompt = trace.prompt_tokens.astype(np.int64)
    length = np.concatenate([[*one, prompt[row]] for row, one in enumerate(ends)]).astype(np.int64)
    own = number == count[of] - 1
    whole = _with_ids(trace, count > 1, spec.block_size)
    columns: dict[str, Any] = {
        field.name: getattr(whole, field.name)[of]
        for field in fields(whole)
        if isinstance(getattr(whole, field.name), np.ndarray)
        and field.name not in ("prefix_ids", "prefix_offsets")
    }
    columns["prompt_tokens"] = length.astype(np.int32)
    columns["output_tokens"] = np.where(own, columns["output_tokens"], 1).astype(np.int32)
    trip_s = TRIP_S_PER_TOKEN * length
    columns["think_s"] = np.where(number == 0, columns["think_s"], trip_s)
    columns["turn"] = (columns["turn"] * int(count.max()) + number).astype(np.int32)
    columns["session"] = _sessions(whole, count > 1)[of]
    columns["slice_of"] = np.where(own, NO_SLICE, last[of]).astype(np.int32)
    columns |= _ids(whole, of, own)
    return Sliced(replace(whole, **columns, media=whole.media.take(of)), first, last)


def _ends(trace: Trace, plan: Plan, spec: EngineSpec) -> list[list[int]]:
    """The cuts of each request."""
    found: list[list[int]] = [[]] * len(trace)
    by_tier = [plan.tiers[name].slice_tokens for name in trace.tier_names]
    if not spec.enable_prefix_caching or not any(by_tier):
        return found
    asked = np.array([tokens or np.iinfo(np.int32).max for tokens in by_tier])[trace.tier]
    longest = (spec.num_gpu_blocks - 1) * spec.block_size
    whole = trace.prompt_tokens.astype(np.int64) + trace.output_tokens > longest
    whole |= np.isfinite(trace.cancel_after_s) | (np.diff(trace.media.offsets) > 0)
    for row in np.flatnonzero((trace.prompt_tokens > asked) & ~whole):
        found[row] = cuts(int(trace.prompt_tokens[row]), int(asked[row]))
    return found


def _with_ids(trace: Trace, cut: npt.NDArray[np.bool_], block_size: int) -> Trace:
    """The trace with prefix ids for all of the prompts that are cut."""
    size = np.where(trace.prefix_block_tokens > 0, trace.prefix_block_tokens, block_size)
    have = np.diff(trace.prefix_offsets)
    more = np.where(cut, np.maximum(0, trace.prompt_tokens // size - have), 0)
    offsets = np.concatenate(([0], np.cumsum(have + more)))
    ids = np.empty(offsets[-1], np.int64)
    row = np.repeat(np.arange(len(trace)), have + more)
    recorded = np.arange(len(ids)) - offsets[row] < have[row]
    ids[recorded] = trace.prefix_ids
    ids[~recorded] = int(trace.prefix_ids.max(initial=-1)) + 1 + np.arange(int(more.sum()))
    return replace(
        trace,
        prefix_ids=ids.astype(np.int32),
        prefix_offsets=offsets.astype(np.int64),
        prefix_block_tokens=np.where(have + more > 0, size, 0).astype(np.int32),
    )


def _ids(
    trace: Trace, of: IntArray, own: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[np.generic]]:
    """Prefix ids of the requests; their slices have none of their own."""
    counts = np.where(own, np.diff(trace.prefix_offsets)[of], 0)
    offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    return {"prefix_offsets": offsets, "prefix_ids": trace.prefix_ids}


def _sessions(trace: Trace, cut: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Session of each request; one that is cut and has none gets its own."""
    session = trace.session.astype(np.int64)
    lone = np.flatnonzero(cut & (session == NO_SESSION))
    session[lone] = max(NO_SESSION, int(session.max(initial=NO_SESSION))) + 1 + np.arange(len(lone))
    return session.astype(np.int32)
