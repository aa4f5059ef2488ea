"""One interval's figures by tier, computed where the requests are: a table of numbers.

It sums up and resets the interval's counters; `report` gives the columns their names.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.layout import F8, FINISHED, NONE, State

COLUMNS = (
    "arrivals",
    "arrived_prompt_tokens",
    "queue_length",
    "queued_prefill_tokens",
    "oldest_wait_s",
    "running",
    "kv_blocks_used",
    "kv_blocks_guaranteed",
    "kv_blocks_lent",
    "prefill_tokens",
    "decode_tokens",
    "cached_tokens",
    "finished",
    "refused",
    "attainment",
    "attainment_samples",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "tpot_ms_p50",
    "tpot_ms_p99",
    "preemptions",
    "recomputed_tokens",
    "acceptance",
    "vft_skew_flags",
    "service_ms",
    "met_tokens",
)
"""Fields of `TierTelemetry` in the order of the table's columns."""
HEADS = (
    "time_s",
    "interval_s",
    "step_ms_mean",
    "steps",
    "batch_mean",
    "kv_use_fraction",
    "busy_fraction",
)
"""Fields of `Telemetry` in the order of the engine's own line."""


@compiled
def head(s: State, start_s: float, start_busy_ms: float, line: F8) -> None:
    """Fill the engine's line, shape (HEADS,), for an interval that began at `start_s`."""
    e = s.engine[0]
    length_s, busy_ms = e.now_s - start_s, e.busy_ms - start_busy_ms
    line[0], line[1] = e.now_s, length_s
    line[2] = busy_ms / e.interval_steps if e.interval_steps > 0 else np.nan
    line[3] = e.interval_steps
    line[4] = e.interval_batch / e.interval_steps if e.interval_steps > 0 else np.nan
    line[5] = 1.0 - (e.empty_blocks + e.cached_blocks) / e.total_blocks
    line[6] = min(1.0, busy_ms * 1e-3 / length_s) if length_s > 0.0 else 0.0


@compiled
def _quantile(ordered: F8, count: int, share: float) -> float:
    """Linear interpolation between the sorted values around rank `share * (count - 1)`."""
    if count == 0:
        return np.nan
    rank = share * (count - 1)
    low = int(rank)
    high = min(low + 1, count - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


@compiled
def _put_latencies(s: State, tier: int, scratch: F8, line: F8) -> None:
    """Quantiles of the interval's first tokens and of its ended answers, into columns 16 to 19."""
    e = s.engine[0]
    count = 0
    for at in range(e.firsts):
        r = s.req[s.first_log[at]]
        if r.tier == tier:
            scratch[count] = (r.first_s - r.arrived_s) * 1e3
            count += 1
    scratch[:count].sort()
    line[16], line[17] = _quantile(scratch, count, 0.5), _quantile(scratch, count, 0.99)
    count = 0
    for at in range(e.dones):
        r = s.req[s.done_log[at]]
        if r.tier == tier and r.outcome == FINISHED and r.output > 1:
            scratch[count] = (r.last_s - r.first_s) / (r.output - 1) * 1e3
            count += 1
    scratch[:count].sort()
    line[18], line[19] = _quantile(scratch, count, 0.5), _quantile(scratch, count, 0.99)


@compiled
def _lent(s: State, pool: int) -> int:
    """Blocks of a pool's guarantee that others hold: their excess, spread over the idle parts."""
    excess, idle = 0, 0
    for p in range(len(s.pools)):
        held, guaranteed = s.pools[p].held, s.pools[p].guaranteed
        excess += max(0, held - guaranteed)
        idle += max(0, guaranteed - held)
    mine = max(0, s.pools[pool].guaranteed - s.pools[pool].held)
    return excess * mine // max(1, idle)


@inlined
def _acceptance(s: State, tier: int) -> float:
    """Share of the interval's draft tokens that were accepted; begins a new interval."""
    d = s.drafting[tier]
    share = d.interval_accepted / d.interval_drafts if d.interval_drafts > 0 else np.nan
    d.interval_drafts = d.interval_accepted = 0
    return share


@compiled
def summarise(s: State, table: F8) -> None:
    """Fill the table, shape (tiers, COLUMNS), and begin a new interval."""
    e = s.engine[0]
    scratch = np.empty(max(e.firsts, e.dones))
    for number in range(len(s.tiers)):
        t, line = s.tiers[number], table[number]
        pool = s.pools[t.pool]
        line[0], line[1] = t.arrivals, t.arrived_tokens
        line[2], line[3] = t.waiting, t.waiting_tokens
        line[4] = 0.0 if t.first == NONE else e.now_s - s.req[t.first].arrived_s
        line[5] = t.running
        line[6], line[7], line[8] = pool.held, pool.guaranteed, _lent(s, t.pool)
        line[9], line[10], line[11] = t.prefill_tokens, t.decode_tokens, t.cached
        line[12], line[13] = t.finished, t.refused
        line[14] = t.met / t.judged if t.judged > 0 else np.nan
        line[15] = t.judged
        _put_latencies(s, number, scratch, line)
        line[20], line[21], line[22] = t.preemptions, t.recomputed, _acceptance(s, number)
        line[23], line[24] = t.skewed, t.service_ms
        line[25] = t.met_tokens
        t.arrivals = t.arrived_tokens = t.prefill_tokens = t.decode_tokens = 0
        t.finished = t.refused = t.judged = t.met = 0
        t.preemptions = t.recomputed = t.skewed = t.cached = 0
        t.service_ms = t.met_tokens = 0.0
    e.interval_steps = 0
    e.interval_batch = 0
    e.firsts = 0
    e.dones = 0
