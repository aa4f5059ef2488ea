"""What one step carries under the fair rules: which prefills go on, who joins, how many tokens.

Decodes always run. Prefills and waiting requests take their chunk in the order of virtual finishes
(rules 1, 14), first within their tier's share of the budget, then from what the others leave (rule
4), as far as the running token deadlines allow (rule 13) and blocks and batch slots are there
(rules 5, 6, 8).
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.kv_cache import find_cached, free_blocks, kept_blocks
from trimtab.engine_bridge.replay.layout import DECODING, F8, NONE, State
from trimtab.engine_bridge.replay.lifecycle import admit, preempt, resumed_list
from trimtab.engine_bridge.replay.victims import (
    call_back,
    cap_victim,
    displace,
)
from trimtab.engine_bridge.rules.budget import chunk_within, predicted_step_ms, step_limit_ms
from trimtab.engine_bridge.rules.fair_queue import (
    lift_tier,
    next_by_feasibility,
    next_by_finish,
    tier_start_ms,
)
from trimtab.engine_bridge.rules.pools import (
    ADMIT,
    CALL_BACK,
    MOST_DISPLACED,
    PLACES_A_SPARE,
    SPARED_AT_CAP,
    admission_verdict,
)

SCAN = 64
"""Requests of one tenant that rule 14 looks at."""

# Why a tier admits no more in this step: no place in the batch, no tokens for it in this pass (open
# again in the next, but its share kept it out of the first), or a limit of its own.
_NO_PLACE, _NO_TOKENS, _REOPENED, _HELD = 1, 2, -1, 3

# Slots of the step's running totals.
_TOKENS, _CHUNKS, _PAIRS, _LOW, _BUDGET, _LIMIT, _OPEN = 0, 1, 2, 3, 4, 5, 6


@compiled
def _limit_ms(s: State) -> float:
    """Rule 13: the tightest of the protected running requests' limits, in believed model time."""
    e = s.engine[0]
    limit = np.inf
    if e.rule_slack == 0:
        return limit
    for slot in range(e.running):
        r = s.req[s.running[slot]]
        tier = s.tiers[r.tier]
        if r.status == DECODING and tier.protected == 1 and tier.tpot_s < np.inf:
            slack_s = r.due_base_s + e.step * tier.tpot_s - e.now_s
            limit = min(
                limit, step_limit_ms(tier.tpot_s, slack_s, e.tpot_fraction, e.slack_fraction)
            )
    return limit / e.scale


@compiled
def _contended(s: State) -> bool:
    """Whether a protected tier is there to be hurt by low tiers' prefill."""
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        if tier.protected == 1 and tier.running + tier.waiting > 0:
            return True
    return False


@compiled
def _chunk(s: State, totals: F8, row: int, computed: int, first_pass: bool) -> int:
    """Tokens that this request may add to the step now; 0 closes the step when time is up."""
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    most = min(r.target - computed - r.grant, int(totals[_BUDGET] - totals[_TOKENS]))
    if first_pass:
        most = min(most, int(tier.prefill_share * totals[_BUDGET]) - tier.granted)
    if tier.low == 1 and totals[_LOW] >= 0.0:
        most = min(most, max(1, int(e.low_share * totals[_BUDGET])) - int(totals[_LOW]))
    if most <= 0:
        return 0
    if totals[_LIMIT] == np.inf:
        return most
    cached = float(computed + r.grant)
    chunks, tokens, pairs = totals[_CHUNKS], totals[_TOKENS], totals[_PAIRS]
    if r.grant > 0:
        chunks -= 1.0
    whole_ms = predicted_step_ms(
        s.coef,
        float(e.decoding),
        float(e.read_tokens),
        chunks + 1.0,
        tokens + most,
        pairs + most * (cached + 0.5 * most),
    )
    if whole_ms <= totals[_LIMIT]:
        return most
    within = chunk_within(
        s.coef,
        totals[_LIMIT],
        float(e.decoding),
        float(e.read_tokens),
        chunks,
        tokens,
        pairs,
        cached,
        most,
    )
    # A little prefill always goes on: late decodes must not stop the line for good.
    least = min(most, max(0, e.min_chunk - int(tokens)))
    totals[_OPEN] = 0.0
    return max(within, least)


@compiled
def _grant(s: State, totals: F8, row: int, tokens: int) -> None:
    r = s.req[row]
    tier = s.tiers[r.tier]
    before = float(r.computed + r.grant)
    if r.grant == 0:
        totals[_CHUNKS] += 1.0
    totals[_TOKENS] += tokens
    totals[_PAIRS] += tokens * (before + 0.5 * tokens)
    if tier.low == 1 and totals[_LOW] >= 0.0:
        totals[_LOW] += tokens
    tier.granted += tokens
    r.grant += tokens


@compiled
def _pick_candidate(s: State, number: int) -> None:
    """The tier's next request: a preempted one whose time has come, else by rule 1 or 14."""
    e, tier = s.engine[0], s.tiers[number]
    row = s.lists[resumed_list(s, number)].head
    while row != NONE and s.req[row].eligible_s > e.now_s:
        row = s.req[row].next
    if row != NONE:
        tier.candidate_finish_ms = s.req[row].finish_tag_ms
    elif e.rule_feasible == 1:
        row = next_by_feasibility(
            s.engine, s.tiers, s.tenants, s.req, s.lists, s.active, number, SCAN
        )
    else:
        row = next_by_finish(s.tiers, s.tenants, s.req, s.lists, s.active, number)
    tier.candidate = row


@compiled
def _block(s: State, number: int) -> None:
    """No more admissions from this tier in this step, nor from lower ones of its pool."""
    tier = s.tiers[number]
    for t in range(len(s.tiers)):
        other = s.tiers[t]
        if other.pool == tier.pool and other.weight <= tier.weight:
            other.blocked = _HELD


@compiled
def _may_give_way_again(s: State, row: int) -> bool:
    """Whether a request that gave way before could be displaced by whoever arrives next.

    Not when it is its tier's turn, nor if nobody else runs.
    """
    e, r = s.engine[0], s.req[row]
    return r.preemptions > 0 and e.running > 0 and tier_start_ms(s.tiers[r.tier]) > e.tier_v


@compiled
def _spare_places(s: State, row: int) -> int:
    """Places of the batch that stay free when a request comes back that was displaced often.

    So it need not leave for the next arrival of a higher tier.
    """
    often = s.req[row].preemptions - SPARED_AT_CAP + 1
    if often <= 0 or not _may_give_way_again(s, row):
        return 0
    return min(often, MOST_DISPLACED, s.engine[0].max_seqs // PLACES_A_SPARE)


@compiled
def _find_blocks(s: State, row: int, need: int) -> bool:
    """Rules 5 and 6 for one waiting request: are `need` blocks free, or can they be called back?"""
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    # Each decode needs at most one block in this step; more is a cushion against preemptions.
    headroom = e.headroom_blocks * e.decoding
    if e.rule_pools == 0:
        return need + headroom <= free_blocks(s)
    pool = s.pools[tier.pool]
    room = 0
    if _may_give_way_again(s, row) and (pool.held > 0 or need > pool.guaranteed):
        # Who gave way before comes back only where more room is left than it takes itself.
        room = min(r.preemptions, MOST_DISPLACED) * need
    verdict = admission_verdict(
        need,
        free_blocks(s),
        e.claimed_blocks + kept_blocks(s, tier.pool, tier.weight),
        headroom + room,
        pool.held + room,
        pool.guaranteed,
    )
    if verdict == ADMIT:
        return True
    if verdict == CALL_BACK:
        if call_back(s, tier.pool, tier.weight, need + e.decoding):
            return True
        e.claimed_blocks += need
        return False
    return r.preemptions == 0 and displace(s, tier.pool, tier.weight, need + e.decoding)


@compiled
def _try_admit(s: State, totals: F8, number: int, first_pass: bool) -> bool:
    """Admit the tier's candidate with a first chunk; on failure say why in `blocked`."""
    e, tier = s.engine[0], s.tiers[number]
    row = tier.candidate
    r = s.req[row]
    if tier.running >= tier.max_running:
        tier.blocked = _HELD
        return False
    if e.running + _spare_places(s, row) >= e.max_seqs > e.running:
        tier.blocked = _HELD
        return False
    at_cap = e.running >= e.max_seqs
    # Above a lowered cap nobody is swapped either: the batch must drain first.
    swap = at_cap and e.rule_cap == 1 and e.running == e.max_seqs
    start_ms = tier_start_ms(tier)
    if at_cap and (not swap or cap_victim(s, tier.weight, start_ms) == NONE):
        tier.blocked = _NO_PLACE
        return False
    groups, named, own, idle = find_cached(s, row)
    computed = min((named + own) * e.block_size, r.target - 1)
    tokens = _chunk(s, totals, row, computed, first_pass)
    if tokens <= 0:
        tier.blocked = _NO_TOKENS
        return False
    need = -(-r.target // e.block_size) - named - own + idle
    if not _find_blocks(s, row, need):
        _block(s, number)
        return False
    if e.running >= e.max_seqs:
        preempt(s, cap_victim(s, tier.weight, start_ms))
    # A victim may have held some of the blocks found: look again.
    groups, named, own, idle = find_cached(s, row)
    if -(-r.target // e.block_size) - named - own + idle > free_blocks(s):
        _block(s, number)
        return False
    admit(s, row, groups, own, r.target)
    tier.blocked = 0
    _grant(s, totals, row, min(tokens, r.target - r.computed))
    return True


@compiled
def _next_prefill(s: State, mark: int) -> int:
    """The running prefill with the least virtual finish that this pass has not looked at."""
    e = s.engine[0]
    best = NONE
    for at in range(e.prefilling):
        row = s.prefilling[at]
        r = s.req[row]
        if r.mark != mark and (best == NONE or r.finish_tag_ms < s.req[best].finish_tag_ms):
            best = row
    return best


@compiled
def _next_tier(s: State) -> int:
    """The open tier whose candidate has the least virtual finish."""
    best = NONE
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        if tier.blocked > 0 or tier.candidate == NONE:
            continue
        r = s.req[tier.candidate]
        if r.preemptions == 0:
            tier.candidate_finish_ms = tier_start_ms(tier) + r.estimate_ms / tier.weight
        if best == NONE or tier.candidate_finish_ms < s.tiers[best].candidate_finish_ms:
            best = t
    return best


@compiled
def _pass(s: State, totals: F8, first_pass: bool, mark: int, admissions: bool) -> None:
    """Hand out tokens once through prefills and waiting requests, in virtual-finish order."""
    while totals[_OPEN] == 1.0 and totals[_TOKENS] < totals[_BUDGET]:
        row = _next_prefill(s, mark)
        number = _next_tier(s) if admissions else NONE
        if row == NONE and number == NONE:
            return
        if number != NONE and (
            row == NONE or s.tiers[number].candidate_finish_ms < s.req[row].finish_tag_ms
        ):
            candidate = s.tiers[number].candidate
            if _try_admit(s, totals, number, first_pass):
                s.req[candidate].mark = mark
                _pick_candidate(s, number)
            continue
        s.req[row].mark = mark
        tokens = _chunk(s, totals, row, s.req[row].computed, first_pass)
        if tokens > 0:
            _grant(s, totals, row, tokens)


@compiled
def plan_fair(s: State) -> int:
    """Set every `grant` of the step; returns the prefill tokens granted."""
    e = s.engine[0]
    fresh = e.waiting > 0 and e.blocked_epoch != e.epoch
    if e.prefilling == 0 and not fresh:
        return 0
    totals = np.zeros(7)
    totals[_BUDGET] = e.max_tokens - e.decoding
    if e.rule_budget == 1:
        totals[_BUDGET] = min(float(e.budget), totals[_BUDGET])
    totals[_LIMIT] = _limit_ms(s)
    totals[_OPEN] = 1.0
    totals[_LOW] = 0.0 if e.rule_slack == 1 and _contended(s) else -1.0
    e.claimed_blocks = 0
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        tier.blocked = 0
        tier.granted = 0
        tier.candidate = NONE
        if fresh and tier.waiting > 0:
            _pick_candidate(s, t)
    mark = 2 * (e.step % 1_000_000) + 1
    seen = e.epoch
    if e.rule_shares == 1 and e.rule_budget == 1:
        _pass(s, totals, True, mark, fresh)
        for t in range(len(s.tiers)):
            if s.tiers[t].blocked == _NO_TOKENS:
                s.tiers[t].blocked = _REOPENED
    _pass(s, totals, False, mark + 1, fresh)
    if fresh:
        _lift_held(s, totals)
    _note_blocked(s, totals, seen)
    # Not the running total: a prefill may have been preempted after its grant.
    tokens = 0
    for at in range(e.prefilling):
        tokens += s.req[s.prefilling[at]].grant
    return tokens


@compiled
def _lift_held(s: State, totals: F8) -> None:
    """A tier that limits of its own kept out banks no credit from it (rule 3), like an idle one."""
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        why = tier.blocked
        short = why == _NO_TOKENS and totals[_OPEN] == 1.0
        if tier.active_count > 0 and (why in (_HELD, _REOPENED) or short):
            behind_ms = tier.largest_estimate_ms / tier.weight
            lift_tier(s.engine, s.tiers, t, behind_ms)


@compiled
def _note_blocked(s: State, totals: F8, seen: int) -> None:
    """Remember a queue that only an event can move, so that nobody looks at it until then."""
    e = s.engine[0]
    if e.waiting == 0 or e.epoch != seen or totals[_OPEN] == 0.0:
        return
    if totals[_TOKENS] >= totals[_BUDGET]:
        return
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        if tier.candidate != NONE and tier.blocked != _NO_PLACE and tier.blocked != _HELD:
            # Short of tokens this step: the budget and low shares are new in the next.
            return
    e.blocked_epoch = e.epoch
