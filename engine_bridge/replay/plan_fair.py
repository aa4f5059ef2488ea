"""What one step carries under the fair rules, one decision at a time.

`next_op` says what is to be done next: who gives way, whose cached blocks to look up, who joins,
and that the step is complete. It never touches blocks itself. Whoever drives it does what it says:
the replay on its counted blocks (`plan_fair`), the vLLM plug-in on vLLM's own
(`trimtab.engine_bridge.vllm.ledger`). So both engines decide with the same code.

Decodes always run. First they get their new blocks. Then prefills and waiting requests take their
chunk in the order of virtual finishes (rules 1, 14), at first within their tier's share of the
budget, then from what the others leave (rule 4), as far as the running token deadlines allow (rule
13) and blocks and batch slots are there (rules 5, 6, 8).
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.chunk_order import delay_passed, first_in_tier, passed_ms
from trimtab.engine_bridge.replay.chunks import chunk, grant, open_step
from trimtab.engine_bridge.replay.encoding import evict, open_items
from trimtab.engine_bridge.replay.isolation import candidate_first, first_of_tier
from trimtab.engine_bridge.replay.item_limits import is_held_back
from trimtab.engine_bridge.replay.kv_cache import free_blocks, look_up, take_growth
from trimtab.engine_bridge.replay.layout import BUDGET, NONE, OPEN, TOKENS, WORK, State
from trimtab.engine_bridge.replay.left_out import (
    HELD,
    NO_PLACE,
    NO_TOKENS,
    REOPENED,
    lift_left_out,
    note_blocked,
)
from trimtab.engine_bridge.replay.lifecycle import admit, preempt, resumed_list
from trimtab.engine_bridge.replay.names import name_blocks
from trimtab.engine_bridge.replay.padding import has_room_padded, pad, reserve, slots
from trimtab.engine_bridge.replay.room import (
    HAS_ROOM,
    MAKES_ROOM,
    room_for,
    room_victim,
    spare_places,
    still_fits,
)
from trimtab.engine_bridge.replay.victims import cap_victim, growth_blocks, growth_victim
from trimtab.engine_bridge.rules.fair_queue import (
    candidate_start_ms,
    lead_ms,
    next_by_feasibility,
    next_by_finish,
    tier_start_ms,
)

# What is to be done next: nothing more in this step; give the decodes their new blocks; preempt
# `engine.op_row`; look up its cached blocks (into `found_*`); let it join the batch.
DONE, GROW, PREEMPT, LOOK_UP, ADMIT = 0, 1, 2, 3, 4

# Where the plan of the step stands.
_ROOM, _GROWN, _PICK, _JUDGE, _MAKE_ROOM, _PLACE, _CHECK, _JOIN, _JOINED, _END = range(10)

SCAN = 64
"""Requests of one tenant that rule 14 looks at."""
SCAN_A_TIER = 256
"""Of a tier's in all; of each waiting tenant one at least. A long queue must not cost a step."""


@compiled
def pick_candidate(s: State, number: int) -> None:
    """The tier's next request: a preempted one whose time has come, else by rule 1 or 14."""
    e, tier = s.engine[0], s.tiers[number]
    row = s.lists[resumed_list(s, number)].head
    while row != NONE and (s.req[row].eligible_s > e.now_s or is_held_back(s, row)):
        row = s.req[row].next
    if row != NONE:
        tier.candidate_finish_ms = s.req[row].finish_tag_ms
    elif e.rule_feasible == 1:
        scan = max(1, min(SCAN, SCAN_A_TIER // max(1, tier.active_count)))
        row = next_by_feasibility(
            s.engine, s.tiers, s.tenants, s.req, s.lists, s.active, number, scan
        )
    else:
        row = next_by_finish(s.engine, s.tiers, s.tenants, s.req, s.lists, s.active, number)
    tier.candidate = row
    if row == NONE and tier.active_count > 0:
        # Each tenant that waits does so for an item's turn.
        tier.blocked = NO_TOKENS


@compiled
def _block(s: State, number: int) -> None:
    """No more admissions from this tier in this step, nor from lower ones of its pool."""
    tier = s.tiers[number]
    for t in range(len(s.tiers)):
        other = s.tiers[t]
        if other.pool == tier.pool and other.weight <= tier.weight:
            other.blocked = HELD


@inlined
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


@inlined
def _next_tier(s: State) -> int:
    """The open tier whose candidate has the least virtual finish, less its lead."""
    e = s.engine[0]
    best = NONE
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        if tier.blocked > 0 or tier.candidate == NONE:
            continue
        r = s.req[tier.candidate]
        if r.preemptions == 0:
            lead = lead_ms(s.engine, s.tenants[r.tenant], r, e.age_tiers_ms)
            if e.rule_chunks == 1:
                tier.passed_ms = passed_ms(s, tier.candidate)
            start = candidate_start_ms(tier)
            tier.candidate_finish_ms = start + r.estimate_ms / tier.weight - lead
        if best == NONE or tier.candidate_finish_ms < s.tiers[best].candidate_finish_ms:
            best = t
    return best


@inlined
def begin_plan(s: State) -> None:
    """A new step is to be planned."""
    e = s.engine[0]
    e.stage = _ROOM if e.grown_step != e.step else _GROWN


@inlined
def next_op(s: State) -> int:
    """Decide until something is to be done; `engine.op_row` says to whom."""
    e = s.engine[0]
    while e.stage != _END:
        op = _make_place(s) if e.stage >= _MAKE_ROOM else _choose(s)
        if op != NONE:
            return op
    return DONE


@inlined
def _choose(s: State) -> int:
    """One move towards the request that is next."""
    e = s.engine[0]
    if e.stage == _ROOM:
        return _find_room(s)
    if e.stage == _PICK:
        return _pick(s)
    if e.stage == _GROWN:
        _open(s)
    else:
        _judge(s)
    return NONE


@inlined
def _make_place(s: State) -> int:
    """One move of a request that is to join: blocks, a place, its first tokens."""
    e = s.engine[0]
    if e.stage == _MAKE_ROOM:
        return _make_room(s)
    if e.stage == _PLACE:
        return _find_place(s)
    if e.stage == _CHECK:
        return _look_again(s)
    if e.stage == _JOIN:
        return _join(s)
    _grant_first(s)
    return NONE


@inlined
def _find_room(s: State) -> int:
    """Rule 6 for the decodes' growth: preempt until it fits, then let them grow."""
    e = s.engine[0]
    row = growth_victim(s)
    if row != NONE:
        e.op_row = row
        return PREEMPT
    e.stage = _GROWN
    if growth_blocks(s) > 0:
        return GROW
    take_growth(s)
    return NONE


@inlined
def _open(s: State) -> None:
    """Begin to hand out tokens, if there is anybody to hand them to."""
    e = s.engine[0]
    e.fresh = 1 if e.waiting > 0 and e.blocked_epoch != e.epoch else 0
    if e.prefilling == 0 and e.fresh == 0:
        e.stage = _END
        return
    open_step(s)
    e.claimed_blocks = 0
    e.mark = 2 * (e.step % 1_000_000) + 1
    e.seen_epoch = e.epoch
    e.first_pass = 1 if e.rule_shares == 1 and e.rule_budget == 1 else 0
    if e.first_pass == 0:
        e.mark += 1
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        tier.blocked = 0
        tier.granted = 0
        tier.candidate = NONE
        if e.fresh == 1 and tier.waiting > 0:
            pick_candidate(s, t)
    e.stage = _PICK


@inlined
def _pick(s: State) -> int:
    """Who is next: a running prefill takes its chunk here, a waiting request is looked at."""
    e, totals = s.engine[0], s.totals
    row, number = NONE, NONE
    if totals[OPEN] == 1.0 and totals[TOKENS] + totals[WORK] < totals[BUDGET]:
        row = _next_prefill(s, e.mark)
        if row != NONE and e.longest_step_ms < np.inf:
            row = first_of_tier(s, e.mark, row)
        number = _next_tier(s) if e.fresh == 1 else NONE
    if row == NONE and number == NONE:
        _next_pass(s)
        return NONE
    joins = number != NONE and candidate_first(s, number, row)
    if e.rule_chunks == 1:
        row = first_in_tier(s, number if joins else int(s.req[row].tier), number)
        joins = row == NONE
    if joins:
        return _consider(s, number)
    s.req[row].mark = e.mark
    tokens = chunk(s, row, s.req[row].computed, e.first_pass == 1)
    if tokens > 0:
        grant(s, row, tokens)
    return NONE


@inlined
def _next_pass(s: State) -> None:
    """The first pass is over, or the plan is."""
    e = s.engine[0]
    if e.first_pass == 0:
        _close(s)
        e.stage = _END
        return
    e.first_pass = 0
    e.mark += 1
    for t in range(len(s.tiers)):
        if s.tiers[t].blocked == NO_TOKENS:
            s.tiers[t].blocked = REOPENED
            if e.item_held == 1:
                pick_candidate(s, t)


@compiled
def _consider(s: State, number: int) -> int:
    """Is there a place in the batch for the tier's candidate? Then look up what it finds cached."""
    e, tier = s.engine[0], s.tiers[number]
    row = tier.candidate
    if tier.running >= tier.max_running:
        tier.blocked = HELD
        return NONE
    if e.running + spare_places(s, row) >= e.max_seqs > e.running:
        tier.blocked = HELD
        return NONE
    at_cap = e.running >= e.max_seqs
    # Above a lowered cap nobody is swapped either: the batch must drain first.
    swap = at_cap and e.rule_cap == 1 and e.running == e.max_seqs
    if at_cap and (not swap or cap_victim(s, tier.weight, tier_start_ms(tier)) == NONE):
        tier.blocked = NO_PLACE
        return NONE
    e.plan_tier = number
    e.op_row = row
    e.victims = 0
    e.stage = _JUDGE
    return LOOK_UP


@compiled
def defer_candidate(s: State, until_s: float) -> None:
    """The request that was to be looked up cannot join before `until_s`: go on with the next."""
    e = s.engine[0]
    s.req[e.op_row].eligible_s = until_s
    tier = s.tiers[e.plan_tier]
    pick_candidate(s, e.plan_tier)
    if tier.candidate == e.op_row:
        tier.blocked = HELD
    e.stage = _PICK


@compiled
def _judge(s: State) -> None:
    """Rules 4, 13 and 5 for the request that was looked up."""
    e = s.engine[0]
    row = s.tiers[e.plan_tier].candidate
    r = s.req[row]
    computed = min(r.found_blocks * e.block_size, r.target - 1)
    e.op_tokens = chunk(s, row, computed, e.first_pass == 1)
    if e.op_tokens <= 0 and is_held_back(s, row):
        pick_candidate(s, e.plan_tier)
        e.stage = _PICK
        return
    if e.op_tokens <= 0 or not has_room_padded(s, row, computed):
        s.tiers[e.plan_tier].blocked = NO_TOKENS
        e.stage = _PICK
        return
    e.need_blocks = -(-slots(s, row) // e.block_size) - r.found_blocks + r.found_idle
    verdict = room_for(s, row, e.need_blocks)
    if verdict == HAS_ROOM:
        e.stage = _PLACE
    elif verdict == MAKES_ROOM:
        e.stage = _MAKE_ROOM
    else:
        _block(s, e.plan_tier)
        e.stage = _PICK


@compiled
def _make_room(s: State) -> int:
    """Call lent blocks back, or displace lower tiers of the pool, until the need fits."""
    e = s.engine[0]
    if still_fits(s, e.plan_tier):
        e.stage = _PLACE
        return NONE
    row = room_victim(s, e.plan_tier)
    if row == NONE:
        _block(s, e.plan_tier)
        e.stage = _PICK
        return NONE
    e.op_row = row
    e.victims += 1
    return PREEMPT


@compiled
def _find_place(s: State) -> int:
    """At the batch cap somebody of a lower tier makes place."""
    e = s.engine[0]
    e.stage = _CHECK
    if e.running < e.max_seqs:
        return NONE
    tier = s.tiers[e.plan_tier]
    row = cap_victim(s, tier.weight, tier_start_ms(tier))
    if row == NONE:
        tier.blocked = NO_PLACE
        e.stage = _PICK
        return NONE
    e.op_row = row
    e.victims += 1
    return PREEMPT


@compiled
def _look_again(s: State) -> int:
    """A victim may have held some of the blocks found."""
    e = s.engine[0]
    e.stage = _JOIN
    e.op_row = s.tiers[e.plan_tier].candidate
    return LOOK_UP if e.victims > 0 else NONE


@compiled
def _join(s: State) -> int:
    e = s.engine[0]
    r = s.req[e.op_row]
    if -(-slots(s, e.op_row) // e.block_size) - r.found_blocks + r.found_idle > free_blocks(s):
        _block(s, e.plan_tier)
        e.stage = _PICK
        return NONE
    delay_passed(s, int(e.op_row))
    e.stage = _JOINED
    return ADMIT


@compiled
def _grant_first(s: State) -> None:
    """The first chunk of who has just joined; then its tier's next request."""
    e = s.engine[0]
    tier, row = s.tiers[e.plan_tier], int(e.op_row)
    r = s.req[row]
    tier.blocked = 0
    if e.drafting > 0:
        reserve(s, row)
    if e.encoding == 1:
        open_items(s, row, r.computed)
    grant(s, row, min(e.op_tokens, r.target - r.computed))
    name_blocks(s, row, r.computed + r.grant, False)
    r.mark = e.mark
    pick_candidate(s, e.plan_tier)
    e.stage = _PICK


@inlined
def _close(s: State) -> None:
    """Everything is handed out: keep the books of who was left out, and of what is computed."""
    e = s.engine[0]
    if e.fresh == 1:
        lift_left_out(s)
    note_blocked(s)
    if e.encoding == 1 and e.external == 0:
        evict(s, 0)
    for at in range(e.prefilling):
        r = s.req[s.prefilling[at]]
        if r.grant > 0:
            name_blocks(s, s.prefilling[at], r.computed + r.grant, True)


@inlined
def granted_tokens(s: State) -> int:
    """Prefill tokens of the step; not the running total, as a prefill may have given way since."""
    tokens = 0
    for at in range(s.engine[0].prefilling):
        tokens += s.req[s.prefilling[at]].grant
    return tokens


@compiled
def plan_fair(s: State) -> int:
    """Plan a step of the replay: set every `grant`; returns the prefill tokens granted."""
    e = s.engine[0]
    begin_plan(s)
    op = next_op(s)
    while op != DONE:
        if op == PREEMPT:
            preempt(s, e.op_row)
        elif op == LOOK_UP:
            look_up(s, e.op_row)
        elif op == ADMIT:
            admit(s, e.op_row, slots(s, e.op_row))
        else:
            take_growth(s)
        op = next_op(s)
    if e.drafting > 0:
        pad(s)
    return granted_tokens(s)
