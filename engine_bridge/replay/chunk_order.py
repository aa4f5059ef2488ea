"""Rule 14 for running prefills: who of a tier gets the step's next chunk (`feasible.chunks`).

Without it a prompt that is being read goes before everything of its tier that comes later. It knows
one tier; which tier is next is decided at the tier level by `plan_fair`.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.layout import NONE, State
from trimtab.engine_bridge.rules.fair_queue import (
    candidate_start_ms,
    lead_ms,
    queued_start_ms,
    tier_start_ms,
)


@inlined
def _left_ms(s: State, row: int) -> float:
    """What a started request is still expected to use."""
    return max(0.0, s.req[row].estimate_ms - s.req[row].service_ms)


@inlined
def _begun_ms(s: State, row: int) -> float:
    """Virtual start of a started request's next chunk among its tier's tenants, normalised ms."""
    r = s.req[row]
    return r.tenant_finish_ms - _left_ms(s, row) / s.tenants[r.tenant].share


@compiled
def _is_urgent(s: State, row: int) -> bool:
    """Whether a request has a deadline to lose: it can still meet its TTFT, or has begun to answer.

    So is one that is due (ageing). Nobody is without rule 14, nor in a tier without a TTFT target.
    """
    e, r = s.engine[0], s.req[row]
    tier, window_ms = s.tiers[r.tier], e.age_tenants_ms
    if e.rule_feasible == 0 or tier.ttft_s == np.inf:
        return False
    if r.generated > 0:
        return True
    if window_ms > 0.0 and lead_ms(s.engine, s.tenants[r.tenant], r, window_ms) == window_ms:
        return True
    left_ms = max(0.0, r.prefill_estimate_ms - r.service_ms)
    return bool(e.now_s + left_ms * 1e-3 <= r.arrived_s + tier.ttft_s)


@compiled
def _passes(s: State, row: int, running: int) -> bool:
    """Whether a tier's candidate goes before one of the tier's running prefills.

    Urgent ones pass others within rule 14's window; of two that are not, the earlier finish among
    the tenants goes first, of one tenant's two the one that runs.
    """
    e, r, p = s.engine[0], s.req[row], s.req[running]
    if r.spared != p.spared:
        return bool(r.spared == 1)
    urgent = _is_urgent(s, row)
    if _is_urgent(s, running) or (r.tenant == p.tenant and not urgent):
        return bool(r.preemptions > 0 and r.finish_tag_ms < p.finish_tag_ms)
    tenant = s.tenants[r.tenant]
    if r.preemptions > 0:
        start_ms = _begun_ms(s, row)
    else:
        start_ms = queued_start_ms(tenant, s.req, s.lists, row)
        start_ms -= lead_ms(s.engine, tenant, r, e.age_tenants_ms)
    begun_ms = _begun_ms(s, running)
    if urgent:
        return bool(start_ms <= begun_ms + e.window_ms)
    # Who was idle while the other was read has no claim on that time.
    finish_ms = max(start_ms, begun_ms) + _left_ms(s, row) / tenant.share
    return bool(finish_ms < p.tenant_finish_ms)


@compiled
def passed_ms(s: State, row: int) -> float:
    """What the running prefills that a tier's candidate passes are still expected to use."""
    passed = 0.0
    for at in range(s.engine[0].prefilling):
        other = s.prefilling[at]
        if s.req[other].tier == s.req[row].tier and _passes(s, row, other):
            passed += _left_ms(s, other)
    return passed


@compiled
def delay_passed(s: State, row: int) -> None:
    """A tier's candidate starts: the prefills that it passes come as much later at the tier level.

    And after it, also one that has used more than was expected of it. Otherwise they would keep,
    against the other tiers, tags from before what has passed them, and hold up who comes new.
    """
    r = s.req[row]
    tier = s.tiers[r.tier]
    if s.engine[0].rule_chunks == 0 or r.preemptions > 0:
        return
    after_ms = r.estimate_ms / tier.weight
    latest_ms = tier_start_ms(tier) + after_ms
    own_ms = candidate_start_ms(tier) + after_ms
    for at in range(s.engine[0].prefilling):
        other = s.prefilling[at]
        p = s.req[other]
        if p.tier == r.tier and _passes(s, row, other):
            later_ms = max(own_ms, min(p.finish_tag_ms + after_ms, latest_ms))
            p.finish_tag_ms = max(p.finish_tag_ms, later_ms)


@compiled
def first_in_tier(s: State, number: int, open_tier: int) -> int:
    """The tier's running prefill that is next; `NONE` if its candidate goes before them all.

    Spared ones (rule 16) first, then urgent ones in the order of their tags, then the others by
    their finish among the tenants; only those that this pass has not looked at.

    Args:
        s: The memory.
        number: The tier.
        open_tier: The tier whose candidate is next; another one's candidate may not start.
    """
    best, best_rank, best_key = NONE, 0, np.inf
    for at in range(s.engine[0].prefilling):
        row = s.prefilling[at]
        r = s.req[row]
        if r.mark == s.engine[0].mark or r.tier != number:
            continue
        urgent = _is_urgent(s, row)
        rank = (0 if r.spared == 1 else 2) + (0 if urgent else 1)
        key = r.finish_tag_ms if urgent else r.tenant_finish_ms
        if best == NONE or rank < best_rank or (rank == best_rank and key < best_key):
            best, best_rank, best_key = row, rank, key
    if best != NONE and number == open_tier and _passes(s, s.tiers[number].candidate, best):
        return NONE
    return best
