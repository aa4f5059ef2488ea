"""Long prompts in slices, as the gateway would send them, for a run of the replay.

A request over its tier's `slice_tokens` becomes turns of a closed loop: growing prefixes with one
output token, then itself. `fold` puts the rows of the run back together, so that all figures are
about the requests of the trace. The cuts themselves are `engine_bridge.slicing`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.pricing import repeated_prompt_tokens
from trimtab.engine_bridge.replay.report import ReplayResult
from trimtab.engine_bridge.slicing import cuts
from trimtab.engine_bridge.trace import NO_SESSION, Trace

IntArray = npt.NDArray[np.int64]
Columns = dict[str, npt.NDArray[np.generic]]

TRIP_S_PER_TOKEN = 1e-6
"""What sending a slice takes before the engine has it, per token of its prefix: reading the ids,
hashing their blocks (docs/slicing.md)."""
_OF_FIRST = ("arrival_s", "admitted_s")
_SUMS = ("preemptions", "recomputed_tokens", "service_ms")


@dataclass(frozen=True)
class Sliced:
    """A trace in slices, and how its rows belong together."""

    trace: Trace
    first: IntArray
    """Row of each request's first slice, its own where it has none, shape (requests,)."""
    last: IntArray
    """Row of the request itself, likewise."""

    def fold(self, result: ReplayResult) -> ReplayResult:
        """The run with one row a request of the trace as it was.

        A request arrives with its first slice and ends by itself; preemptions, recomputed tokens
        and engine time are sums. Tokens that its slices computed do not count as cached.
        """
        if len(self.trace) == len(self.last):
            return result
        return replace(
            result,
            requests=self._columns(result.requests),
            encode_ms=np.add.reduceat(result.encode_ms, self.first),
        )

    def _columns(self, rows: Mapping[str, npt.NDArray[np.generic]]) -> Columns:
        folded: Columns = {name: column[self.last] for name, column in rows.items()}
        for name in _OF_FIRST:
            folded[name] = rows[name][self.first]
        for name in _SUMS:
            folded[name] = np.add.reduceat(rows[name], self.first).astype(rows[name].dtype)
        own = np.zeros(len(self.trace), np.bool_)
        own[self.last] = True
        read = np.isfinite(np.asarray(rows["admitted_s"], np.float64)) & ~own
        prompt, cached = (np.asarray(rows[n], np.int64) for n in ("prompt_tokens", "cached_tokens"))
        by_slices = np.add.reduceat(np.where(read, prompt - cached, 0), self.first)
        left = np.maximum(0, np.asarray(folded["cached_tokens"], np.int64) - by_slices)
        folded["cached_tokens"] = left.astype(rows["cached_tokens"].dtype)
        return folded


def in_slices(trace: Trace, plan: Plan, spec: EngineSpec) -> Sliced:
    """The trace as the engine meets it behind a gateway with this plan.

    What an earlier row has asked for already counts as read. A request stays whole if it could
    never fit the cache, if it shows media (tokens cannot say them), or if its client gives up:
    nobody knows when its slices would arrive.
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
    columns |= _ids(whole, of, length, own)
    columns["media"] = whole.media.take(of)
    return Sliced(replace(whole, **columns), first, last)


def _ends(trace: Trace, plan: Plan, spec: EngineSpec) -> list[list[int]]:
    """The cuts of each request."""
    found: list[list[int]] = [[]] * len(trace)
    by_tier = [plan.tiers[name].slice_tokens for name in trace.tier_names]
    if not spec.enable_prefix_caching or not any(by_tier):
        return found
    asked = np.array([tokens or np.iinfo(np.int32).max for tokens in by_tier])[trace.tier]
    longest = (spec.num_gpu_blocks - 1) * spec.block_size
    fits = trace.prompt_tokens.astype(np.int64) + trace.output_tokens <= longest
    text = np.diff(trace.media.offsets) == 0
    known = repeated_prompt_tokens(trace)
    for row in np.flatnonzero(
        (trace.prompt_tokens > asked) & fits & text & np.isinf(trace.cancel_after_s)
    ):
        ends = cuts(int(trace.prompt_tokens[row]), int(asked[row]))
        found[row] = [end for end in ends if end > known[row]]
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
    trace: Trace, of: IntArray, length: IntArray, own: npt.NDArray[np.bool_]
) -> dict[str, npt.NDArray[np.generic]]:
    """Prefix ids of every slice: those of its blocks; the request itself keeps all."""
    have = np.diff(trace.prefix_offsets)[of]
    size = np.maximum(1, trace.prefix_block_tokens[of])
    counts = np.where(own, have, np.minimum(have, length // size))
    offsets = np.concatenate(([0], np.cumsum(counts)))
    start = np.repeat(trace.prefix_offsets[of] - offsets[:-1], counts)
    return {
        "prefix_offsets": offsets.astype(np.int64),
        "prefix_ids": trace.prefix_ids[start + np.arange(offsets[-1])],
    }


def _sessions(trace: Trace, cut: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """Session of each request; one that is cut and has none gets its own."""
    session = trace.session.astype(np.int64)
    lone = np.flatnonzero(cut & (session == NO_SESSION))
    session[lone] = max(NO_SESSION, int(session.max(initial=NO_SESSION))) + 1 + np.arange(len(lone))
    return session.astype(np.int32)
