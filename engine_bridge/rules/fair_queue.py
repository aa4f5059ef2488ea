"""Rules 1 to 3 and 14: hierarchical weighted fair queueing with trued-up accounts.

It keeps the accounts and the order of the waiting; it does not know why a request cannot be
admitted.

A *flow* is a tier (against the other tiers) or a tenant (against its tier's other tenants). Its
virtual start is

    S = account + (outstanding - bypassed) / weight

`account` is the service its requests have really used, over its weight, in milliseconds, lifted
when it comes back from idling so that no credit is banked. `outstanding` is what its dispatched
requests are still expected to use: at dispatch a request counts with its estimate, as it runs its
real use moves from `outstanding` to `account`, at its end the rest is given back (rule 2). So an
estimate moves only the order. `bypassed` (tenants only) is what was dispatched ahead of the queue's
head under rule 14: it is hidden from S, so that the head keeps its place while others pass.

A tenant's queue is a line of positions in raw milliseconds of estimates. A request at position x
starts at S + (x - position of the head) / share. The virtual finish is the start plus the request's
own estimate over the weight. docs/fairness.md derives the bound; a tier's `peak_*` fields keep what
it needs.

A request that waits gains a *lead* (ageing): where requests are compared it counts as that much
earlier, at most by the window of the level. No account knows of it.

The functions take record arrays with the fields of `trimtab.engine_bridge.replay.layout`: engine
(one record), tiers, tenants, requests, lists, active.
"""

from __future__ import annotations

from typing import Any

from trimtab.engine_bridge.compiled import compiled, inlined

Records = Any
NONE = -1

# Rule 14's order, where ageing has its say first.
_DUE, _FEASIBLE, _LATE = 0, 1, 2


@inlined
def tier_start_ms(tier: Records) -> float:
    """Virtual start of a tier's next request, normalised ms."""
    return tier.account_ms + tier.outstanding_ms / tier.weight


@inlined
def candidate_start_ms(tier: Records) -> float:
    """The same for the request that it offers, as if it had started before those that it passes."""
    return tier_start_ms(tier) - tier.passed_ms / tier.weight


@inlined
def tenant_start_ms(tenant: Records) -> float:
    """Virtual start of the head of a tenant's queue, normalised ms."""
    return tenant.account_ms + (tenant.outstanding_ms - tenant.bypassed_ms) / tenant.share


@inlined
def queued_start_ms(tenant: Records, req: Records, lists: Records, row: int) -> float:
    """Virtual start of a waiting request among its tier's tenants, normalised ms."""
    r = req[row]
    before_ms = r.position_ms - req[lists[r.list].head].position_ms
    return tenant_start_ms(tenant) + before_ms / tenant.share


@inlined
def lead_ms(engine: Records, tenant: Records, r: Records, window_ms: float) -> float:
    """By how much ageing brings a waiting request forward, normalised ms; at most `window_ms`."""
    if window_ms == 0.0 or r.demoted == 1:
        return 0.0
    e = engine[0]
    return window_ms * min(1.0, tenant.bonus + e.lead_per_s * (e.now_s - r.arrived_s))


@compiled
def _note_peaks(tiers: Records) -> None:
    """Keep what rule 3's bound needs, at a moment when tags are compared.

    That is each tier's outstanding estimates and largest single estimate, over its weight.
    """
    for number in range(len(tiers)):
        t = tiers[number]
        t.peak_outstanding_ms = max(t.peak_outstanding_ms, t.outstanding_ms / t.weight)
        t.peak_estimate_ms = max(t.peak_estimate_ms, t.largest_estimate_ms / t.weight)


@compiled
def lift_tier(engine: Records, tiers: Records, number: int, behind_ms: float) -> None:
    """Raise a tier that was idle or held back to its level's virtual time: it banks no credit.

    Raised so that it is at most `behind_ms` (normalised) behind. A tier that waits may be by the
    estimate of its next request: shorter ones with a later start but an earlier finish went first.
    """
    e, tier = engine[0], tiers[number]
    start, least = tier_start_ms(tier), e.tier_v - behind_ms
    if start < least:
        tier.account_ms += least - start
        tier.tag_ms = e.tier_v
    tier.lapsed = 1
    _note_peaks(tiers)


@compiled
def enqueue(
    engine: Records,
    tiers: Records,
    tenants: Records,
    req: Records,
    lists: Records,
    active: Any,
    row: int,
    account: int,
) -> None:
    """Put a request with its estimate at the back of its tenant's queue.

    A tier or tenant that was idle is lifted to its level's virtual time first.
    """
    tenant = tenants[account]
    tier = tiers[tenant.tier]
    if tenant.active_slot == NONE:
        # An idle tenant's account rises to now: what it did not use is gone.
        start = tenant_start_ms(tenant)
        if start < tier.tenant_v:
            tenant.account_ms += tier.tenant_v - start
        if tier.active_count == 0:
            lift_tier(engine, tiers, tenant.tier, 0.0)
        slot = tier.active_start + tier.active_count
        active[slot] = account
        tenant.active_slot = slot
        tier.active_count += 1
    r = req[row]
    r.position_ms = tenant.tail_ms
    r.width_ms = r.estimate_ms
    tier.largest_estimate_ms = max(tier.largest_estimate_ms, r.estimate_ms)
    tenant.tail_ms += r.width_ms
    push_back(req, lists, row, account)


@compiled
def push_back(req: Records, lists: Records, row: int, number: int) -> None:
    """Append a request to a list."""
    at, r = lists[number], req[row]
    r.list = number
    r.next = NONE
    r.prev = at.tail
    if at.tail == NONE:
        at.head = row
    else:
        req[at.tail].next = row
    at.tail = row
    at.count += 1


@compiled
def insert_before(req: Records, lists: Records, row: int, number: int, place: int) -> None:
    """Put a request before another one of a list; `place` NONE appends."""
    if place == NONE:
        push_back(req, lists, row, number)
        return
    at, r, after = lists[number], req[row], req[place]
    r.list = number
    r.next = place
    r.prev = after.prev
    if after.prev == NONE:
        at.head = row
    else:
        req[after.prev].next = row
    after.prev = row
    at.count += 1


@compiled
def unlink(req: Records, lists: Records, row: int) -> None:
    """Take a request out of the list it is in."""
    r = req[row]
    at = lists[r.list]
    if r.prev == NONE:
        at.head = r.next
    else:
        req[r.prev].next = r.next
    if r.next == NONE:
        at.tail = r.prev
    else:
        req[r.next].prev = r.prev
    at.count -= 1
    r.list = NONE


@compiled
def _leave(
    tiers: Records,
    tenants: Records,
    req: Records,
    lists: Records,
    active: Any,
    row: int,
    account: int,
    served: bool,
) -> None:
    """Take a request out of its tenant's queue and keep the others' starts right."""
    tenant, r = tenants[account], req[row]
    if lists[account].head == row:
        after = r.next
        end = tenant.tail_ms if after == NONE else req[after].position_ms
        # What lies between it and the next head was dispatched earlier: no longer hidden.
        tenant.bypassed_ms -= end - r.position_ms - r.width_ms
        unlink(req, lists, row)
    elif served:
        tenant.bypassed_ms += r.width_ms
        unlink(req, lists, row)
    else:
        # It leaves unserved: those behind it move up.
        behind = r.next
        while behind != NONE:
            req[behind].position_ms -= r.width_ms
            behind = req[behind].next
        tenant.tail_ms -= r.width_ms
        unlink(req, lists, row)
    if lists[account].count == 0:
        tier = tiers[tenant.tier]
        last = tier.active_start + tier.active_count - 1
        moved = active[last]
        active[tenant.active_slot] = moved
        tenants[moved].active_slot = tenant.active_slot
        tenant.active_slot = NONE
        tier.active_count -= 1
        tenant.bypassed_ms = 0.0
        if tier.active_count == 0:
            tier.lapsed = 1


@compiled
def dispatch(
    engine: Records,
    tiers: Records,
    tenants: Records,
    req: Records,
    lists: Records,
    active: Any,
    row: int,
    account: int,
    true_up: int,
) -> None:
    """Account for a request that starts now; its estimate may have changed while it waited."""
    e, tenant, r = engine[0], tenants[account], req[row]
    tier = tiers[tenant.tier]
    start = candidate_start_ms(tier)
    lead = lead_ms(engine, tenant, r, e.age_tiers_ms)
    e.tier_v = max(e.tier_v, start - lead)
    lead_in_tier = lead_ms(engine, tenant, r, e.age_tenants_ms)
    tier.tenant_v = max(tier.tenant_v, tenant_start_ms(tenant) - lead_in_tier)
    r.tenant_finish_ms = queued_start_ms(tenant, req, lists, row) - lead_in_tier
    r.tenant_finish_ms += r.estimate_ms / tenant.share
    tier.since_due = 0 if lead_in_tier == e.age_tenants_ms else tier.since_due + 1
    # From now on the lead stays as it is: a running prefill and who gave way compete with it.
    r.finish_tag_ms = start + r.estimate_ms / tier.weight - lead
    tier.tag_ms = start + r.width_ms / tier.weight
    _note_peaks(tiers)
    _leave(tiers, tenants, req, lists, active, row, account, True)
    if true_up:
        tenant.outstanding_ms += r.estimate_ms
        tier.outstanding_ms += r.estimate_ms
        _note_peaks(tiers)
    else:
        tenant.account_ms += r.estimate_ms / tenant.share
        tier.account_ms += r.estimate_ms / tier.weight


@compiled
def withdraw(
    tiers: Records,
    tenants: Records,
    req: Records,
    lists: Records,
    active: Any,
    row: int,
    account: int,
) -> None:
    """Take out a waiting request that will not be served now: nothing is charged."""
    _leave(tiers, tenants, req, lists, active, row, account, False)


@inlined
def use(
    tiers: Records, tenants: Records, req: Records, row: int, account: int, ms: float, true_up: int
) -> None:
    """Book `ms` of real service to a dispatched request (rule 2's true-up)."""
    tenant, r = tenants[account], req[row]
    tier = tiers[tenant.tier]
    left = max(0.0, r.estimate_ms - r.service_ms)
    r.service_ms += ms
    tier.service_ms += ms
    tenant.service_ms += ms
    tier.normalised_ms += ms / tier.weight
    if not true_up:
        return
    moved = left - max(0.0, r.estimate_ms - r.service_ms)
    tenant.account_ms += ms / tenant.share
    tier.account_ms += ms / tier.weight
    tenant.outstanding_ms -= moved
    tier.outstanding_ms -= moved
    tier.peak_past_tag_ms = max(tier.peak_past_tag_ms, tier.account_ms - tier.tag_ms)


@compiled
def expect(
    tiers: Records,
    tenants: Records,
    req: Records,
    row: int,
    account: int,
    more_ms: float,
    true_up: int,
) -> None:
    """Raise a running request's estimate: it has outlived its prediction."""
    tenant, r = tenants[account], req[row]
    tier = tiers[tenant.tier]
    left = max(0.0, r.estimate_ms - r.service_ms)
    r.estimate_ms += more_ms
    if not true_up:
        return
    more = max(0.0, r.estimate_ms - r.service_ms) - left
    tenant.outstanding_ms += more
    tier.outstanding_ms += more


@compiled
def settle(
    tiers: Records, tenants: Records, req: Records, row: int, account: int, true_up: int
) -> None:
    """Give back what an ended request did not use of its estimate."""
    if not true_up:
        return
    tenant, r = tenants[account], req[row]
    tier = tiers[tenant.tier]
    left = max(0.0, r.estimate_ms - r.service_ms)
    tenant.outstanding_ms -= left
    tier.outstanding_ms -= left


@compiled
def least_start_ms(
    tiers: Records, tenants: Records, active: Any, tier_number: int, held: int
) -> float:
    """The least virtual start among a tier's waiting tenants; infinity if none waits.

    Tenants with the mark `held` do not count.
    """
    tier = tiers[tier_number]
    least = float("inf")
    for slot in range(tier.active_start, tier.active_start + tier.active_count):
        if tenants[active[slot]].held_mark != held:
            least = min(least, tenant_start_ms(tenants[active[slot]]))
    return least


@inlined
def held_mark(engine: Records) -> int:
    """The mark of tenants whose next request a media item holds back in this pass of the plan."""
    return engine[0].mark if engine[0].item_held == 1 else NONE


@compiled
def next_by_finish(
    engine: Records,
    tiers: Records,
    tenants: Records,
    req: Records,
    lists: Records,
    active: Any,
    tier_number: int,
) -> int:
    """Rule 1 inside a tier: the head with the least virtual finish less lead, ties by arrival."""
    e, tier = engine[0], tiers[tier_number]
    best, best_finish, held = NONE, float("inf"), held_mark(engine)
    for slot in range(tier.active_start, tier.active_start + tier.active_count):
        account = active[slot]
        tenant = tenants[account]
        if tenant.held_mark == held:
            continue
        row = lists[account].head
        finish = tenant_start_ms(tenant) + req[row].estimate_ms / tenant.share
        finish -= lead_ms(engine, tenant, req[row], e.age_tenants_ms)
        if finish < best_finish or (
            finish == best_finish and req[row].arrived_s < req[best].arrived_s
        ):
            best, best_finish = row, finish
    return best


@compiled
def next_by_feasibility(
    engine: Records,
    tiers: Records,
    tenants: Records,
    req: Records,
    lists: Records,
    active: Any,
    tier_number: int,
    scan: int,
) -> int:
    """Rule 14 inside a tier.

    Among the waiting whose virtual start lies within `window_ms` of the least, or whose lead brings
    it before the least, those that are due (their lead is the whole window) go first, by virtual
    start; then those that can still meet their TTFT, by virtual start plus `prefill_factor` times
    the prefill (infinite: by the prefill alone); then the others by virtual start less lead. At
    most `scan` requests of a tenant are looked at.
    """
    e, tier = engine[0], tiers[tier_number]
    window = e.age_tenants_ms
    due_first = window > 0.0 and tier.since_due + 1 >= e.due_every
    held = held_mark(engine)
    least = least_start_ms(tiers, tenants, active, tier_number, held)
    edge, by_prefill = least + e.window_ms, e.prefill_factor == float("inf")
    best, best_rank, best_key = NONE, _LATE, float("inf")
    for slot in range(tier.active_start, tier.active_start + tier.active_count):
        account = active[slot]
        tenant = tenants[account]
        if tenant.held_mark == held:
            continue
        row, seen = lists[account].head, 0
        head_start, head_ms = tenant_start_ms(tenant), req[row].position_ms
        while row != NONE and seen < scan:
            r = req[row]
            # From the head on, so that rounding never puts the least start itself past the edge.
            start = head_start + (r.position_ms - head_ms) / tenant.share
            lead = lead_ms(engine, tenant, r, window)
            if start > edge and start - lead > least:
                break
            prefill_ms = r.prefill_estimate_ms
            if due_first and lead == window:
                rank, key = _DUE, start
            elif e.now_s + prefill_ms * 1e-3 > r.arrived_s + tier.ttft_s:
                rank, key = _LATE, start - lead
            elif by_prefill:
                rank, key = _FEASIBLE, prefill_ms
            else:
                rank, key = _FEASIBLE, start + e.prefill_factor * prefill_ms / tenant.share
            if rank < best_rank or (rank == best_rank and key < best_key):
                best, best_rank, best_key = row, rank, key
            row = r.next
            seen += 1
    return best
