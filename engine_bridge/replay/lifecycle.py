"""What happens to one request: arrives, is admitted, decodes, is preempted, ends.

Each function keeps every count of the state true; when and to whom it happens is decided elsewhere
(`plan_fair`, `plan_stock`, `loop`).
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.pricing import OUTPUT_PRICE, REPEATED_PROMPT_PRICE
from trimtab.engine_bridge.replay.encoding import drop_items, first_open
from trimtab.engine_bridge.replay.isolation import is_spared
from trimtab.engine_bridge.replay.kv_cache import (
    hold_cached,
    look_up,
    note_misses,
    release,
    take_blocks,
)
from trimtab.engine_bridge.replay.layout import (
    CANCELLED,
    DECODING,
    DONE,
    EVENT_ARRIVAL,
    EVENT_CANCEL,
    EVENT_ELIGIBLE,
    FAIR,
    FCFS,
    FINISHED,
    NONE,
    PREFILLING,
    REFUSED,
    SHED,
    WAITING,
    State,
)
from trimtab.engine_bridge.replay.names import name_blocks
from trimtab.engine_bridge.replay.slices import believe_read, following, unread
from trimtab.engine_bridge.replay.timers import plan_step_event, push_time_event
from trimtab.engine_bridge.rules import fair_queue
from trimtab.engine_bridge.rules.cost import (
    decode_cost_ms,
    learn_output,
    prefill_cost_ms,
    skew,
)
from trimtab.engine_bridge.rules.pools import backoff_s


@inlined
def _step_tokens(s: State, row: int) -> float:
    """Tokens that a request is expected to get in a decode step."""
    r = s.req[row]
    return 1.0 if np.isnan(r.acceptance) else s.drafting[r.tier].step_tokens


@inlined
def estimate(s: State, row: int, cached_tokens: int) -> None:
    """Rule 2's two-stage estimate of a request that has not started."""
    e, r = s.engine[0], s.req[row]
    uncached = max(1, r.prompt - cached_tokens)
    # What a slice generates is known.
    r.predicted = 1 if r.slice != NONE else max(1, int(s.tenants[r.tenant].predicted_output))
    r.prefill_estimate_ms = prefill_cost_ms(
        s.coef, float(uncached), float(cached_tokens), e.prefill_share_ms
    )
    if e.encoding == 1:
        for item in range(first_open(s, row, cached_tokens), r.media_first + r.media_count):
            r.prefill_estimate_ms += s.item_ms[item]
    decode_ms = decode_cost_ms(s.coef, float(r.prompt), float(r.predicted), e.decode_share_ms)
    r.estimate_ms = r.prefill_estimate_ms + decode_ms / _step_tokens(s, row)


@compiled
def _enter_tier(s: State, row: int) -> None:
    """Append a request to its tier's list in arrival order."""
    r = s.req[row]
    tier = s.tiers[r.tier]
    r.tier_next = NONE
    r.tier_prev = tier.last
    if tier.last == NONE:
        tier.first = row
    else:
        s.req[tier.last].tier_next = row
    tier.last = row


@compiled
def _leave_tier(s: State, row: int) -> None:
    r = s.req[row]
    tier = s.tiers[r.tier]
    if r.tier_prev == NONE:
        tier.first = r.tier_next
    else:
        s.req[r.tier_prev].tier_next = r.tier_next
    if r.tier_next == NONE:
        tier.last = r.tier_prev
    else:
        s.req[r.tier_next].tier_prev = r.tier_prev


@inlined
def resumed_list(s: State, tier: int) -> int:
    """The list of a tier's preempted requests; under priority rules, of all its waiting ones."""
    return len(s.tenants) + tier


@inlined
def _count_waiting(s: State, row: int, change: int) -> None:
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    e.waiting += change
    tier.waiting += change
    tier.waiting_tokens += change * r.target
    if tier.waiting == 0:
        tier.lapsed = 1


@compiled
def arrive(s: State, row: int, at_s: float) -> None:
    """A request comes in; one that can never fit is refused at once."""
    row = unread(s, row)
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    r.arrived_s = at_s
    r.status = WAITING
    r.target = r.prompt
    tier.arrivals += 1
    tier.arrived_tokens += r.prompt
    e.epoch += 1
    if e.external == 0 and r.prompt + r.output > e.total_blocks * e.block_size:
        end(s, row, REFUSED)
        return
    if r.cancel_after_s < np.inf:
        push_time_event(s, at_s + r.cancel_after_s, row, EVENT_CANCEL)
    if e.mode == FAIR:
        look_up(s, row)
        estimate(s, row, (r.found_blocks - r.found_own) * e.block_size)
        if e.longest_step_ms < np.inf:
            r.spared = is_spared(s, row)
        fair_queue.enqueue(s.engine, s.tiers, s.tenants, s.req, s.lists, s.active, row, r.tenant)
    elif e.mode == FCFS:
        fair_queue.push_back(s.req, s.lists, row, 0)
    else:
        _wait_by_arrival(s, row)
    _enter_tier(s, row)
    _count_waiting(s, row, 1)


@compiled
def leave_queue(s: State, row: int, served: bool) -> None:
    """Take a waiting request out of every list."""
    e, r = s.engine[0], s.req[row]
    _count_waiting(s, row, -1)
    if r.preemptions == 0:
        _leave_tier(s, row)
    if e.mode != FAIR or r.preemptions > 0:
        fair_queue.unlink(s.req, s.lists, row)
    elif served:
        fair_queue.dispatch(
            s.engine, s.tiers, s.tenants, s.req, s.lists, s.active, row, r.tenant, e.rule_true_up
        )
    else:
        fair_queue.withdraw(s.tiers, s.tenants, s.req, s.lists, s.active, row, r.tenant)


@compiled
def demote(s: State, row: int) -> None:
    """Rule 15: a request that is too late goes to the back of its tenant's queue, once."""
    r = s.req[row]
    r.demoted = 1
    _leave_tier(s, row)
    fair_queue.withdraw(s.tiers, s.tenants, s.req, s.lists, s.active, row, r.tenant)
    fair_queue.enqueue(s.engine, s.tiers, s.tenants, s.req, s.lists, s.active, row, r.tenant)
    _enter_tier(s, row)


@compiled
def admit(s: State, row: int, tokens: int) -> None:
    """A waiting request joins the batch with what `look_up` found; `tokens` are held in all."""
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    hold_cached(s, row)
    r.computed = min(r.blocks * e.block_size, r.target - 1)
    if r.preemptions == 0:
        note_misses(s, row)
        r.cached = r.computed
        r.admitted_s = e.now_s
        tier.cached += r.computed
        if e.mode == FAIR:
            estimate(s, row, r.computed)
            r.first_estimate_ms = r.estimate_ms
    else:
        again = max(0, min(r.lost, r.target) - r.computed)
        r.recomputed += again
        tier.recomputed += again
    leave_queue(s, row, True)
    need = -(-tokens // e.block_size)
    take_blocks(s, r.tier, max(0, need - r.blocks))
    r.blocks = max(r.blocks, need)
    r.status = PREFILLING
    r.joined_step = e.step
    r.admission = e.admissions
    e.admissions += 1
    r.slot = e.running
    s.running[e.running] = row
    e.running += 1
    tier.running += 1
    s.prefilling[e.prefilling] = row
    e.prefilling += 1
    r.grant = 0


@compiled
def _leave_batch(s: State, row: int) -> None:
    e, r = s.engine[0], s.req[row]
    e.running -= 1
    moved = s.running[e.running]
    s.running[r.slot] = moved
    s.req[moved].slot = r.slot
    s.tiers[r.tier].running -= 1
    if r.status == PREFILLING:
        _leave_prefilling(s, row)
    else:
        stop_decoding(s, row)


@compiled
def _leave_prefilling(s: State, row: int) -> None:
    """Take a request out of the list of running prefills, keeping the others' order."""
    e = s.engine[0]
    at = 0
    while s.prefilling[at] != row:
        at += 1
    e.prefilling -= 1
    for place in range(at, e.prefilling):
        s.prefilling[place] = s.prefilling[place + 1]


@compiled
def start_decoding(s: State, row: int) -> None:
    """A request whose prompt is computed takes part in every following step, one token each."""
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    _leave_prefilling(s, row)
    r.status = DECODING
    r.sync_step = e.step
    r.sync_token_ms = e.token_ms
    r.sync_read_ms = e.read_ms
    r.sync_read_step_ms = e.read_step_ms
    r.due_base_s = r.first_s + (r.generated - e.step) * tier.tpot_s
    r.phase = (e.step - r.computed) % e.block_size
    s.grow[tier.pool, r.phase] += 1
    s.tier_grow[r.tier, r.phase] += 1
    e.read_tokens += r.computed
    e.decoding += 1
    tier.decoding += 1
    plan_step_event(s, row)


@compiled
def sync(s: State, row: int) -> None:
    """Bring a decoding request's own counts up to this step."""
    e, r = s.engine[0], s.req[row]
    steps = e.step - r.sync_step
    if steps == 0:
        return
    read = e.read_ms - r.sync_read_ms
    read_step = e.read_step_ms - r.sync_read_step_ms
    # It read computed + (step - sync_step) tokens at each step: split into two running sums.
    ms = (e.token_ms - r.sync_token_ms) + (r.computed - r.sync_step) * read + read_step
    use(s, row, ms)
    r.computed += steps
    r.generated += steps
    s.tiers[r.tier].decode_tokens += steps
    r.blocks = max(r.blocks, -(-r.computed // e.block_size))
    r.sync_step = e.step
    r.sync_token_ms = e.token_ms
    r.sync_read_ms = e.read_ms
    r.sync_read_step_ms = e.read_step_ms


@inlined
def use(s: State, row: int, ms: float) -> None:
    """Book real service to a running request."""
    fair_queue.use(s.tiers, s.tenants, s.req, row, s.req[row].tenant, ms, s.engine[0].rule_true_up)


@compiled
def stop_decoding(s: State, row: int) -> None:
    """Take a request out of the decode counts."""
    e, r = s.engine[0], s.req[row]
    sync(s, row)
    if e.grown_step == e.step or r.grant > 0:
        # It has its block for the token of the step that is being planned.
        r.blocks = max(r.blocks, -(-(r.computed + 1 + r.ahead) // e.block_size))
    e.ahead -= r.ahead
    r.ahead = 0
    tier = s.tiers[r.tier]
    s.grow[tier.pool, r.phase] -= 1
    s.tier_grow[r.tier, r.phase] -= 1
    e.read_tokens -= r.computed
    e.decoding -= 1
    tier.decoding -= 1
    r.version += 1


@compiled
def outlive(s: State, row: int) -> None:
    """The output ran over its prediction: expect as much again (rule 2)."""
    e, r = s.engine[0], s.req[row]
    sync(s, row)
    more = decode_cost_ms(s.coef, float(r.computed), float(r.predicted), e.decode_share_ms)
    more /= _step_tokens(s, row)
    r.predicted *= 2
    fair_queue.expect(s.tiers, s.tenants, s.req, row, r.tenant, more, e.rule_true_up)
    plan_step_event(s, row)


@compiled
def preempt(s: State, row: int) -> None:
    """A running request gives way; what it computed stays cached until the blocks are reused."""
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    planned = r.grant
    if r.status == DECODING and e.grown_step == e.step:
        planned += 1
    _leave_batch(s, row)
    drop_items(s, row, e.mode == FAIR)
    # vLLM has named what it planned for this step; under the fair rules it comes after planning.
    named = r.computed + (planned if e.mode != FAIR else 0)
    name_blocks(s, row, named, e.mode != FAIR)
    r.lost = r.computed
    release(s, row, named)
    r.computed = 0
    r.target = r.prompt + r.generated
    r.status = WAITING
    r.preemptions += 1
    r.grant = 0
    tier.preemptions += 1
    e.epoch += 1
    if e.mode == FAIR:
        _wait_resumed(s, row)
    elif e.mode == FCFS:
        fair_queue.insert_before(s.req, s.lists, row, 0, s.lists[0].head)
    else:
        _wait_by_arrival(s, row)
    _count_waiting(s, row, 1)


@compiled
def _wait_by_arrival(s: State, row: int) -> None:
    """Queue a request as vLLM's `priority` does inside a tier: by arrival, then by number."""
    r = s.req[row]
    number = resumed_list(s, r.tier)
    place, after = s.lists[number].tail, NONE
    while place != NONE and (
        s.req[place].arrived_s > r.arrived_s
        or (s.req[place].arrived_s == r.arrived_s and place > row)
    ):
        place, after = s.req[place].prev, place
    fair_queue.insert_before(s.req, s.lists, row, number, after)


@compiled
def _wait_resumed(s: State, row: int) -> None:
    """Queue a preempted request by its virtual finish, out for a while if its tier backs off."""
    e, r = s.engine[0], s.req[row]
    number = resumed_list(s, r.tier)
    place = s.lists[number].head
    while place != NONE and s.req[place].finish_tag_ms <= r.finish_tag_ms:
        place = s.req[place].next
    fair_queue.insert_before(s.req, s.lists, row, number, place)
    r.eligible_s = e.now_s
    if e.rule_backoff == 1 and s.tiers[r.tier].backoff == 1:
        r.eligible_s += backoff_s(e.waiting + 1, e.backoff_step_s, e.backoff_max_s)
        push_time_event(s, r.eligible_s, row, EVENT_ELIGIBLE)


@compiled
def judge(s: State, row: int) -> None:
    """Count whether an ended request met its targets, unless a missed deadline told already."""
    r = s.req[row]
    tier = s.tiers[r.tier]
    if r.judged == 1:
        return
    r.judged = 1
    tier.judged += 1
    if r.outcome != FINISHED:
        return
    met = r.first_s - r.arrived_s <= tier.ttft_s and r.last_s - r.arrived_s <= tier.e2e_s
    if r.output > 1:
        met = met and (r.last_s - r.first_s) / (r.output - 1) <= tier.tpot_s
    if met:
        tier.met += 1
        worth = r.prompt_worth
        if np.isnan(worth):
            worth = r.prompt - (1.0 - REPEATED_PROMPT_PRICE) * r.cached
        tier.met_tokens += worth + OUTPUT_PRICE * r.output


@compiled
def end(s: State, row: int, outcome: int) -> None:
    """A request is over, well or badly; its session's next turn is on its way."""
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    if r.status == PREFILLING or r.status == DECODING:
        _leave_batch(s, row)
        drop_items(s, row, False)
        name_blocks(s, row, r.computed, False)
        release(s, row, r.computed)
    elif r.list != NONE:
        leave_queue(s, row, False)
    if e.mode == FAIR and r.first_estimate_ms > 0.0:
        fair_queue.settle(s.tiers, s.tenants, s.req, row, r.tenant, e.rule_true_up)
    r.status = DONE
    r.outcome = outcome
    r.last_s = e.now_s
    e.epoch += 1
    if r.slice == NONE:
        e.left -= 1
    if outcome == FINISHED:
        _learn(s, row)
        believe_read(s, row)
    elif outcome in (REFUSED, SHED):
        tier.refused += 1
    if outcome != CANCELLED:
        judge(s, row)
    s.done_log[e.dones] = row
    e.dones += 1
    later = following(s, row)
    if later != NONE:
        push_time_event(s, e.now_s + s.req[later].think_s, later, EVENT_ARRIVAL)


@compiled
def _learn(s: State, row: int) -> None:
    """What a finished request teaches: its tenant's output lengths, and the estimate's error."""
    e, r = s.engine[0], s.req[row]
    tier, tenant = s.tiers[r.tier], s.tenants[r.tenant]
    tier.finished += 1
    if r.slice == NONE:
        tenant.predicted_output = learn_output(
            tenant.predicted_output, tenant.samples, float(r.output), e.quantile
        )
        tenant.samples += 1
    if e.mode == FAIR and abs(skew(r.service_ms, r.first_estimate_ms)) > e.skew_fraction:
        tier.skewed += 1
