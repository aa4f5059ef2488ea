"""The step loop: deliver what is due, plan a step, run it, look at who is done; until a time.

How a step is run, `steps` knows, and `drafted_step` where drafts are verified.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.drafted_step import run_drafted_step
from trimtab.engine_bridge.replay.heaps import drop_first
from trimtab.engine_bridge.replay.layout import (
    CANCELLED,
    DECODING,
    DONE,
    EVENT_ARRIVAL,
    EVENT_CANCEL,
    F8,
    FAIR,
    FUTURE,
    NONE,
    SHED,
    State,
)
from trimtab.engine_bridge.replay.lifecycle import arrive, demote, end, sync
from trimtab.engine_bridge.replay.plan_fair import plan_fair
from trimtab.engine_bridge.replay.plan_stock import plan_stock
from trimtab.engine_bridge.replay.steps import (
    advance_prefills,
    book_mixed,
    due_decodes,
    end_in_order,
    run_decodes,
)
from trimtab.engine_bridge.replay.summary import head, summarise
from trimtab.engine_bridge.replay.timers import next_event_s, shed_time_s

REFUSE = 1


@inlined
def _shed(s: State) -> None:
    for t in range(len(s.tiers)):
        while shed_time_s(s, t) <= s.engine[0].seen_s:
            row = s.tiers[t].first
            if s.tiers[t].shed_mode == REFUSE:
                end(s, row, SHED)
            else:
                demote(s, row)


@inlined
def _deliver(s: State) -> None:
    """Arrivals and timers that are due, in the order of their times."""
    e = s.engine[0]
    # Asynchronously this step was scheduled when the last one began.
    e.seen_s = e.began_s if e.lagging == 1 and e.running > 0 else e.now_s
    while True:
        arrival = np.inf
        if e.next_open < len(s.open_rows):
            arrival = s.arrival_s[s.open_rows[e.next_open]]
        timer = s.times[0].key if e.time_events > 0 else np.inf
        if min(arrival, timer) > e.seen_s:
            break
        if arrival <= timer:
            row = s.open_rows[e.next_open]
            e.next_open += 1
            arrive(s, row, arrival)
            continue
        row, kind = s.times[0].row, s.times[0].tag
        drop_first(s.times, e.time_events)
        e.time_events -= 1
        if kind == EVENT_ARRIVAL:
            arrive(s, row, timer)
        elif kind == EVENT_CANCEL:
            if s.req[row].status != DONE and s.req[row].status != FUTURE:
                end(s, row, CANCELLED)
        else:
            e.epoch += 1
    if e.mode == FAIR and e.rule_shedding == 1:
        _shed(s)


@compiled
def _turn(s: State, until_s: float) -> bool:
    """Deliver what is due, then run a step or wait for what comes; False if stuck for good."""
    e = s.engine[0]
    _deliver(s)
    if e.left == 0:
        return True
    tokens = 0
    if e.running > 0 or e.waiting > 0:
        tokens = plan_fair(s) if e.mode == FAIR else plan_stock(s)
    if len(s.step_log) > 0:
        _record_step(s)
    if e.drafting > 0 and tokens + e.decoding > 0:
        run_drafted_step(s, tokens)
    elif tokens > 0:
        book_mixed(s, tokens)
        end_in_order(s, advance_prefills(s, due_decodes(s)))
    elif e.decoding > 0:
        # A prompt that stands before an item may go on in any step.
        run_decodes(s, until_s if e.prefilling == 0 else e.now_s)
        end_in_order(s, due_decodes(s))
    else:
        at = next_event_s(s)
        if at == np.inf:
            return False
        e.now_s = max(e.now_s, min(at, until_s))
        e.began_s = e.now_s
    return True


@inlined
def _record_step(s: State) -> None:
    """Note what the planned step carries."""
    e = s.engine[0]
    e.step_rows = 0
    for slot in range(e.running):
        row = s.running[slot]
        r = s.req[row]
        tokens = 1 + r.ahead if r.status == DECODING else r.grant
        if tokens > 0:
            s.step_log[e.step_rows, 0] = row
            s.step_log[e.step_rows, 1] = tokens
            e.step_rows += 1


@compiled
def advance(s: State, until_s: float) -> bool:
    """Run until `until_s` or until every request is done; False if requests are stuck for good."""
    e = s.engine[0]
    while e.now_s < until_s and e.left > 0:
        if not _turn(s, until_s):
            return False
    return True


@compiled
def advance_step(s: State) -> bool:
    """Run one step, and what happens before it; False if requests are stuck for good."""
    e = s.engine[0]
    step = e.step
    e.step_rows = 0
    while e.step == step and e.left > 0:
        if not _turn(s, np.inf):
            return False
    return True


@compiled
def settle_interval(s: State) -> None:
    """Bring all running requests' accounts up to now; count missed deadlines and tier gaps."""
    e = s.engine[0]
    for slot in range(e.running):
        row = s.running[slot]
        if s.req[row].status == DECODING:
            sync(s, row)
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        row = tier.first
        while row != NONE:
            r = s.req[row]
            waited = e.now_s - r.arrived_s
            if r.judged == 0 and (waited > tier.ttft_s or waited > tier.e2e_s):
                r.judged = 1
                tier.judged += 1
            row = r.tier_next
    _measure_gaps(s)


@compiled
def _measure_gaps(s: State) -> None:
    """Track the spread of normalised service between tiers that both wait (rule 3)."""
    e = s.engine[0]
    for a in range(len(s.tiers)):
        for b in range(a):
            x, y = s.tiers[a], s.tiers[b]
            gap = x.normalised_ms - y.normalised_ms
            # Preempted requests that wait were accounted for when they first started.
            ready = x.active_count > 0 and y.active_count > 0
            both = ready and x.lapsed == 0 and y.lapsed == 0
            if not both or np.isnan(s.gap_low[a, b]):
                # The interval starts now, or is yet to start.
                s.gap_low[a, b] = gap if ready else np.nan
                s.gap_high[a, b] = gap if ready else np.nan
                continue
            s.gap_low[a, b] = min(s.gap_low[a, b], gap)
            s.gap_high[a, b] = max(s.gap_high[a, b], gap)
            e.gap_ms = max(e.gap_ms, s.gap_high[a, b] - s.gap_low[a, b])
    for t in range(len(s.tiers)):
        s.tiers[t].lapsed = 0


@compiled
def close_interval(s: State, start_s: float, start_busy_ms: float, table: F8, line: F8) -> None:
    """Settle and sum up the interval that began at `start_s`; a new one begins."""
    settle_interval(s)
    head(s, start_s, start_busy_ms, line)
    summarise(s, table)


@compiled
def advance_intervals(
    s: State, due_s: float, interval_s: float, until_s: float, tables: F8, heads: F8
) -> tuple[int, float, bool]:
    """Run intervals one after the other, and sum each up, until `until_s` or the tables are full.

    Args:
        s: The replay's memory.
        due_s: When the last interval was due to end.
        interval_s: Length of an interval; each ends with the step that passes its due end.
        until_s: The last interval ends here.
        tables: Shape (intervals, tiers, summary.COLUMNS).
        heads: Shape (intervals, summary.HEADS).

    Returns:
        Intervals run, when the last one was due to end, and False if requests are stuck for good.
    """
    e = s.engine[0]
    count, moving = 0, True
    while count < len(tables) and due_s < until_s and e.left > 0 and moving:
        start_s, start_busy_ms = e.now_s, e.busy_ms
        due_s = min(due_s + interval_s, until_s)
        moving = advance(s, due_s)
        close_interval(s, start_s, start_busy_ms, tables[count], heads[count])
        count += 1
    return count, due_s, moving
