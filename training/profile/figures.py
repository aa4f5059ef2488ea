"""The figures of a traffic profile: who, lengths, bursts, prefixes, in the window and before it.

It counts; what the counts mean is `cause`'s business, how they look is `page`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.pricing import (
    OUTPUT_PRICE,
    REPEATED_PROMPT_PRICE,
    repeated_prompt_tokens,
)
from trimtab.training.profile.logged import BoolArray, FloatArray, Logged, LongArray

MOST_SENDERS: Final = 10
MOST_LONGEST: Final = 5
MOST_PREFIXES: Final = 5
BINS_S: Final = (1.0, 10.0)
"""Lengths over which a peak of arrivals is counted, seconds."""
LEAST_FOR_PEAK: Final = 20
"""Requests below which a peak over the mean says nothing."""
_SHARED: Final = 0.5
_QUANTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


@dataclass(frozen=True, kw_only=True)
class Senders:
    """What each tenant of a tier asked for in a stretch of time; arrays of shape (senders,)."""

    per_s: FloatArray
    """Requests a second."""
    prompt_tokens: FloatArray
    """Mean prompt, tokens; 0 without a request."""
    cached: FloatArray
    """Part of the prompt tokens that the cache saved."""
    output_tokens: FloatArray
    """Mean answer, tokens."""

    @property
    def work(self) -> FloatArray:
        """Priced tokens of one request: fresh prompt + 0.1 x cached prompt + 3 x output."""
        fresh = 1.0 - (1.0 - REPEATED_PROMPT_PRICE) * self.cached
        return self.prompt_tokens * fresh + OUTPUT_PRICE * self.output_tokens

    @property
    def demand(self) -> FloatArray:
        """Priced tokens a second."""
        return self.per_s * self.work


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The window against the time before it."""

    names: tuple[tuple[str, str], ...]
    """Tenant and tier of each sender."""
    now: Senders
    before: Senders | None
    """None where the log does not reach back."""
    repeated_now: FloatArray
    """Part of each sender's prompt tokens that an earlier request had had, shape (senders,)."""
    repeated_before: FloatArray


def compare(logged: Logged) -> Compared:
    """Who asked for what, now and before."""
    trace, now = logged.trace, logged.in_window
    tenants = len(trace.tenant_names)
    pairs = trace.tier.astype(np.int64) * tenants + trace.tenant
    known, sender = np.unique(pairs, return_inverse=True)
    sender = sender.reshape(-1).astype(np.int64)
    repeated = repeated_prompt_tokens(trace)
    count = len(known)

    def part(rows: BoolArray) -> FloatArray:
        prompts = np.bincount(sender[rows], trace.prompt_tokens[rows], count)
        again = np.bincount(sender[rows], repeated[rows], count)
        return np.asarray(again / np.maximum(prompts, 1.0))

    return Compared(
        names=tuple(
            (trace.tenant_names[int(pair) % tenants], trace.tier_names[int(pair) // tenants])
            for pair in known
        ),
        now=_senders(logged, sender, now, count, logged.window_s),
        before=(_senders(logged, sender, ~now, count, logged.before_s) if np.any(~now) else None),
        repeated_now=part(now),
        repeated_before=part(~now),
    )


def _senders(
    logged: Logged, sender: LongArray, rows: BoolArray, count: int, seconds: float
) -> Senders:
    trace = logged.trace
    requests = np.bincount(sender[rows], minlength=count)
    prompts = np.bincount(sender[rows], trace.prompt_tokens[rows], count)
    # What never began found no cache, and what did not end well has no length of its own: of both
    # the sender's others are believed.
    began = rows & logged.began
    read = np.bincount(sender[began], trace.prompt_tokens[began], count)
    cached = np.bincount(sender[began], logged.cached_tokens[began], count)
    ended = rows & logged.ended_well
    ends = np.bincount(sender[ended], minlength=count)
    outputs = np.bincount(sender[ended], trace.output_tokens[ended], count)
    return Senders(
        per_s=requests / max(seconds, 1e-9),
        prompt_tokens=prompts / np.maximum(requests, 1),
        cached=_ratio(cached, read),
        output_tokens=_ratio(outputs, ends),
    )


def _ratio(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> FloatArray:
    """The part by sender; where a sender has nothing, all senders' together."""
    common = float(part.sum()) / float(whole.sum()) if whole.sum() > 0 else 0.0
    return np.where(whole > 0, part / np.maximum(whole, 1e-12), common)


def who(compared: Compared) -> list[dict[str, Any]]:
    """The heaviest senders by demand now, heaviest first."""
    now, before = compared.now, compared.before
    total_now = max(float(now.demand.sum()), 1e-12)
    total_before = 0.0 if before is None else float(before.demand.sum())
    rows = []
    for i in np.argsort(-now.demand, kind="stable")[:MOST_SENDERS]:
        if now.per_s[i] == 0:
            break
        tenant, tier = compared.names[i]
        row: dict[str, Any] = {
            "tenant": tenant,
            "tier": tier,
            "requests_per_s": float(now.per_s[i]),
            "prompt_tokens_mean": float(now.prompt_tokens[i]),
            "output_tokens_mean": float(now.output_tokens[i]),
            "cached_share": float(now.cached[i]),
            "demand_tokens_per_s": float(now.demand[i]),
            "demand_share": float(now.demand[i]) / total_now,
            "before": None,
        }
        if before is not None:
            row["before"] = {
                "requests_per_s": float(before.per_s[i]),
                "demand_tokens_per_s": float(before.demand[i]),
                "demand_share": float(before.demand[i]) / max(total_before, 1e-12),
            }
        rows.append(row)
    return rows


def lengths(logged: Logged) -> dict[str, Any]:
    """Prompt and answer lengths by tier, now and before, tokens."""
    trace, now = logged.trace, logged.in_window
    found = {}
    for number, name in enumerate(trace.tier_names):
        of_tier = trace.tier == number
        found[name] = {
            kind: {"now": _spread(column[of_tier & now]), "before": _spread(column[of_tier & ~now])}
            for kind, column in (
                ("prompt_tokens", trace.prompt_tokens),
                ("output_tokens", trace.output_tokens),
            )
        }
    return found


def first_tokens(logged: Logged) -> dict[str, Any]:
    """Time to first token by tier, now and before, milliseconds; of requests that got one."""
    tier, now = logged.trace.tier, logged.in_window
    found = {}
    for number, name in enumerate(logged.trace.tier_names):
        mine = (tier == number) & logged.began
        found[name] = {
            "now": _spread(logged.ttft_s[mine & now] * 1e3),
            "before": _spread(logged.ttft_s[mine & ~now] * 1e3),
        }
    return found


def longest(logged: Logged) -> list[dict[str, Any]]:
    """The window's longest prompts."""
    trace = logged.trace
    rows = np.flatnonzero(logged.in_window)
    order = rows[np.argsort(-trace.prompt_tokens[rows], kind="stable")][:MOST_LONGEST]
    return [
        {
            "tenant": trace.tenant_names[trace.tenant[row]],
            "tier": trace.tier_names[trace.tier[row]],
            "prompt_tokens": int(trace.prompt_tokens[row]),
            "cached_tokens": int(logged.cached_tokens[row]),
            "output_tokens": int(trace.output_tokens[row]),
            "after_s": float(trace.arrival_s[row]) - logged.before_s,
            "ttft_s": float(logged.ttft_s[row]) if logged.began[row] else None,
            "outcome": logged.outcomes[row],
        }
        for row in order
    ]


def bursts(logged: Logged) -> dict[str, Any]:
    """Peak and mean arrivals of the window, of all and of the busiest tenants."""
    trace, now = logged.trace, logged.in_window
    count = len(trace.tenant_names)
    requests = np.bincount(trace.tenant[now], minlength=count)
    busiest = np.argsort(-requests, kind="stable")[:MOST_SENDERS]
    return {
        "all": _peaks(logged, now),
        "tenants": {
            trace.tenant_names[i]: _peaks(logged, now & (trace.tenant == i))
            for i in busiest
            if requests[i] >= LEAST_FOR_PEAK
        },
    }


def _peaks(logged: Logged, rows: BoolArray) -> dict[str, float]:
    at_s = logged.trace.arrival_s[rows] - logged.before_s
    found = {"mean_per_s": len(at_s) / logged.window_s}
    for bin_s in BINS_S:
        peak = most_within(at_s, bin_s) / min(bin_s, logged.window_s)
        found[f"peak_{bin_s:g}s_per_s"] = peak
        found[f"peak_{bin_s:g}s_over_mean"] = peak / max(found["mean_per_s"], 1e-12)
    return found


def most_within(at_s: FloatArray, span_s: float) -> int:
    """Most of the sorted times that lie within any stretch of `span_s`."""
    if not len(at_s):
        return 0
    return int((np.searchsorted(at_s, at_s + span_s, side="left") - np.arange(len(at_s))).max())


def prefixes(logged: Logged) -> dict[str, Any]:
    """How much of the window's prompts had been sent before, and what is shared most."""
    trace, now = logged.trace, logged.in_window
    repeated = repeated_prompt_tokens(trace)
    found: dict[str, Any] = {}
    for name, rows in (("now", now), ("before", ~now)):
        began = rows & logged.began
        found[name] = {
            "repeated_share": _share(repeated[rows], trace.prompt_tokens[rows]),
            "cached_share": _share(logged.cached_tokens[began], trace.prompt_tokens[began]),
        }
    found["top"] = _top_prefixes(logged, np.flatnonzero(now))
    return found


def _share(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> float | None:
    total = float(whole.sum(dtype=np.float64))
    return float(part.sum(dtype=np.float64)) / total if total else None


def _top_prefixes(logged: Logged, rows: LongArray) -> list[dict[str, Any]]:
    """Prefixes that several of the requests begin with, by the tokens they cover; no content."""
    trace = logged.trace
    rows = rows[np.diff(trace.prefix_offsets)[rows] > 0]
    first = trace.prefix_ids[trace.prefix_offsets[rows]]
    _, group, counts = np.unique(first, return_inverse=True, return_counts=True)
    found: list[dict[str, Any]] = []
    for number in np.argsort(-counts, kind="stable")[: 4 * MOST_PREFIXES]:
        if counts[number] < 2:
            break
        members = rows[group.reshape(-1) == number]
        blocks, sharing = _depth(logged, members)
        tokens = blocks * int(trace.prefix_block_tokens[members[0]])
        tenants = {trace.tenant_names[i] for i in trace.tenant[members]}
        found.append(
            {
                "requests": int(sharing),
                "tokens": tokens,
                "tenants": len(tenants),
                "tenant": next(iter(tenants)) if len(tenants) == 1 else None,
                "tiers": sorted({trace.tier_names[i] for i in trace.tier[members]}),
            }
        )
    found.sort(key=lambda prefix: -prefix["requests"] * prefix["tokens"])
    return found[:MOST_PREFIXES]


def _depth(logged: Logged, members: LongArray) -> tuple[int, int]:
    """The deepest block that at least half of the requests have in common, and how many do.

    Equal ids mean equal prefixes, so that the number of sharers only falls with the depth.
    """
    trace = logged.trace
    offsets, blocks = trace.prefix_offsets[members], np.diff(trace.prefix_offsets)[members]

    def sharers(depth: int) -> int:
        at = offsets[blocks >= depth] + depth - 1
        return int(np.unique(trace.prefix_ids[at], return_counts=True)[1].max()) if len(at) else 0

    low, high = 1, int(blocks.max())
    while low < high:
        middle = (low + high + 1) // 2
        if sharers(middle) >= max(2, _SHARED * len(members)):
            low = middle
        else:
            high = middle - 1
    return low, sharers(low)


def _spread(values: npt.NDArray[Any]) -> dict[str, float] | None:
    if not len(values):
        return None
    marks = {name: float(np.quantile(values, q)) for name, q in _QUANTILES}
    return {"mean": float(values.mean()), **marks, "max": float(values.max())}


def outcomes(logged: Logged) -> dict[str, int]:
    """How the window's requests ended, by number."""
    now = np.flatnonzero(logged.in_window)
    names: Sequence[str] = [logged.outcomes[row] for row in now]
    return {name: names.count(name) for name in sorted(set(names))}
