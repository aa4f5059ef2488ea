"""The step loop: deliver what is due, plan a step, run it, look at who is done; until a time.

Steps that only decode and that nothing can change are run in a tight inner loop (`collapse`): the
same additions in the same order as one at a time, so the results are equal bit for bit.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.heaps import drop_first
from trimtab.engine_bridge.replay.kv_cache import take_growth
from trimtab.engine_bridge.replay.layout import (
    CANCELLED,
    DECODING,
    DONE,
    EVENT_ARRIVAL,
    EVENT_CANCEL,
    F8,
    FAIR,
    FINISHED,
    FUTURE,
    NONE,
    SHED,
    State,
)
from trimtab.engine_bridge.replay.lifecycle import (
    arrive,
    demote,
    end,
    outlive,
    start_decoding,
    sync,
    use,
)
from trimtab.engine_bridge.replay.plan_fair import granted_tokens, plan_fair
from trimtab.engine_bridge.replay.plan_stock import plan_stock
from trimtab.engine_bridge.replay.summary import head, summarise
from trimtab.engine_bridge.replay.victims import growth_blocks
from trimtab.engine_bridge.step_time import (
    decode_attention_ms,
    linear_ms,
    mixed_attention_ms,
    prefill_attention_ms,
)

REFUSE = 1
_SHARE_RATE = 0.01
SCALE_RATE = 0.05


@inlined
def shed_time_s(s: State, number: int) -> float:
    """When the tier's longest waiting request becomes too late (rule 15)."""
    tier = s.tiers[number]
    if tier.shed_mode == 0 or tier.first == NONE or s.req[tier.first].demoted == 1:
        return np.inf
    return s.req[tier.first].arrived_s + tier.shed_at * tier.shed_target_s


@inlined
def next_event_s(s: State) -> float:
    """The earliest time at which something other than a step happens."""
    e = s.engine[0]
    at = np.inf
    if e.next_open < len(s.open_rows):
        at = s.arrival_s[s.open_rows[e.next_open]]
    if e.time_events > 0:
        at = min(at, s.times[0].key)
    if e.mode == FAIR and e.rule_shedding == 1 and e.waiting > 0:
        for t in range(len(s.tiers)):
            at = min(at, shed_time_s(s, t))
    return at


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


@inlined
def _run_decodes(s: State, until_s: float) -> None:
    """Run steps that only decode, until something may change what a step carries."""
    e = s.engine[0]
    coef = s.coef
    count = e.decoding
    linear = linear_ms(coef, float(count), float(count)) * e.speed
    share = linear / count
    stop_step = s.steps[0].key if e.step_events > 0 else np.inf
    # The stock rules try the waiting queue's head at every step that has a free place.
    single = e.collapse == 0 or (e.mode != FAIR and e.waiting > 0 and e.running < e.max_seqs)
    # A plan that took a victim and let nobody join looks again in the next step.
    single = single or (e.mode == FAIR and e.waiting > 0 and e.blocked_epoch != e.epoch)
    event_s = next_event_s(s)
    epoch = e.epoch
    while True:
        e.began_s = e.now_s
        read = decode_attention_ms(coef, float(count), float(e.read_tokens)) * e.speed
        per_token = read / e.read_tokens
        e.now_s += (linear + read) * 1e-3
        e.busy_ms += linear + read
        e.token_ms += share
        e.read_ms += per_token
        e.read_step_ms += per_token * e.step
        e.decode_share_ms += _SHARE_RATE * (share - e.decode_share_ms)
        e.scale += SCALE_RATE * (e.speed - e.scale)
        e.read_tokens += count
        e.step += 1
        e.interval_steps += 1
        e.interval_batch += count
        seen_s = e.began_s if e.lagging == 1 else e.now_s
        if single or e.step >= stop_step or e.now_s >= until_s or seen_s >= event_s:
            return
        if growth_blocks(s) > e.empty_blocks + e.cached_blocks:
            return
        # As the plan of the step that may come now would, before it looks at the queues.
        take_growth(s)
        if e.mode == FAIR and e.epoch != epoch:
            return


@inlined
def _run_mixed(s: State, tokens: int) -> None:
    """Run one step with prefill chunks beside the decodes, and book its time to its requests."""
    e = s.engine[0]
    coef = s.coef
    e.began_s = e.now_s
    chunks, pairs = 0, 0.0
    for at in range(e.prefilling):
        r = s.req[s.prefilling[at]]
        if r.grant > 0:
            chunks += 1
            pairs += r.grant * (r.computed + 0.5 * r.grant)
    decodes = e.decoding
    total = tokens + decodes
    linear = linear_ms(coef, float(total), float(decodes + chunks)) * e.speed
    attention = prefill_attention_ms(coef, float(chunks), float(tokens), pairs) * e.speed
    read = decode_attention_ms(coef, float(decodes), float(e.read_tokens))
    read += mixed_attention_ms(coef, float(tokens), float(decodes), float(e.read_tokens))
    read *= e.speed
    share = linear / total
    for at in range(e.prefilling):
        row = s.prefilling[at]
        r = s.req[row]
        if r.grant > 0:
            part = r.grant * (r.computed + 0.5 * r.grant) / pairs
            use(s, row, share * r.grant + attention * part)
            s.tiers[r.tier].prefill_tokens += r.grant
    if decodes > 0:
        per_token = read / e.read_tokens
        e.token_ms += share
        e.read_ms += per_token
        e.read_step_ms += per_token * e.step
        e.decode_share_ms += _SHARE_RATE * (share - e.decode_share_ms)
    e.now_s += (linear + attention + read) * 1e-3
    e.busy_ms += linear + attention + read
    e.scale += SCALE_RATE * (e.speed - e.scale)
    e.read_tokens += decodes
    e.step += 1
    e.interval_steps += 1
    e.interval_batch += decodes + chunks
    _end_in_order(s, _advance_prefills(s, _due_decodes(s)))


@inlined
def _advance_prefills(s: State, ending: int) -> int:
    """Count the chunks as computed; prompts that are complete give a token.

    Lines those up that end with it, behind `ending` others in `due`; how many end in all.
    """
    e = s.engine[0]
    at = 0
    while at < e.prefilling:
        row = s.prefilling[at]
        r = s.req[row]
        r.computed += r.grant
        r.grant = 0
        if r.computed < r.target:
            at += 1
            continue
        r.generated += 1
        if r.generated == 1:
            r.first_s = e.now_s
            s.first_log[e.firsts] = row
            e.firsts += 1
        s.tiers[r.tier].decode_tokens += 1
        if r.generated == r.output:
            s.due[ending] = row
            ending += 1
            at += 1
        else:
            start_decoding(s, row)
    return ending


@inlined
def _due_decodes(s: State) -> int:
    """Handle the step events that are due: outlived predictions, and last tokens into `due`."""
    e = s.engine[0]
    ending = 0
    while e.step_events > 0 and s.steps[0].key <= e.step:
        row, version = s.steps[0].row, s.steps[0].tag
        drop_first(s.steps, e.step_events)
        e.step_events -= 1
        r = s.req[row]
        if r.version != version or r.status != DECODING:
            continue
        if r.generated + e.step - r.sync_step < r.output:
            outlive(s, row)
            continue
        s.due[ending] = row
        ending += 1
    return ending


@inlined
def _end_in_order(s: State, count: int) -> None:
    """End the requests in `due` in the order in which they joined the batch, as vLLM does.

    Their blocks become idle in that order.
    """
    for after in range(1, count):
        row, at = s.due[after], after
        while at > 0 and s.req[s.due[at - 1]].admission > s.req[row].admission:
            s.due[at] = s.due[at - 1]
            at -= 1
        s.due[at] = row
    for at in range(count):
        end(s, s.due[at], FINISHED)


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
    if tokens > 0:
        _run_mixed(s, tokens)
    elif e.decoding > 0:
        _run_decodes(s, until_s)
        _end_in_order(s, _due_decodes(s))
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
        tokens = 1 if s.req[row].status == DECODING else s.req[row].grant
        if tokens > 0:
            s.step_log[e.step_rows, 0] = row
            s.step_log[e.step_rows, 1] = tokens
            e.step_rows += 1


@compiled
def run_step(s: State) -> None:
    """Run the planned step of a live engine, and look at whose answers outlive their prediction."""
    tokens = granted_tokens(s)
    if tokens > 0:
        _run_mixed(s, tokens)
    elif s.engine[0].decoding > 0:
        _run_decodes(s, np.inf)
        _end_in_order(s, _due_decodes(s))


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
