"""Rules 5 and 6 for one waiting request: is there room, and if not, who makes it.

It says whom to preempt and when it is enough; it preempts nobody.
"""

from __future__ import annotations

from typing import Final

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.cached_items import kept_blocks
from trimtab.engine_bridge.replay.kv_cache import free_blocks
from trimtab.engine_bridge.replay.layout import State
from trimtab.engine_bridge.replay.victims import choose_victim, excess_blocks
from trimtab.engine_bridge.rules.fair_queue import tier_start_ms
from trimtab.engine_bridge.rules.pools import (
    ADMIT,
    CALL_BACK,
    MOST_DISPLACED,
    PLACES_A_SPARE,
    SPARED_AT_CAP,
    admission_verdict,
)

HAS_ROOM: Final = 0
"""The blocks are there."""
MAKES_ROOM: Final = 1
"""Victims will give them: ask `room_victim` until it `still_fits`."""
NO_ROOM: Final = 2
"""Not in this step."""

_NOBODY, _CALL_BACK, _DISPLACE = 0, 1, 2


@compiled
def _may_give_way_again(s: State, row: int) -> bool:
    """Whether a request that gave way before could be displaced by whoever arrives next.

    Not when it is its tier's turn, nor if nobody else runs.
    """
    e, r = s.engine[0], s.req[row]
    return r.preemptions > 0 and e.running > 0 and tier_start_ms(s.tiers[r.tier]) > e.tier_v


@compiled
def spare_places(s: State, row: int) -> int:
    """Places of the batch that stay free when a request comes back that was displaced often.

    So it need not leave for the next arrival of a higher tier.
    """
    often = s.req[row].preemptions - SPARED_AT_CAP + 1
    if often <= 0 or not _may_give_way_again(s, row):
        return 0
    return min(often, MOST_DISPLACED, s.engine[0].max_seqs // PLACES_A_SPARE)


@compiled
def recoverable_blocks(s: State, pool: int, weight: float) -> int:
    """Blocks that calling back could free at most for a request of `pool` and that weight."""
    e = s.engine[0]
    total = 0
    for p in range(len(s.pools)):
        held = 0
        for slot in range(e.running):
            r = s.req[s.running[slot]]
            tier = s.tiers[r.tier]
            lower = tier.weight < weight if p == pool else tier.weight <= weight
            spared = r.preemptions >= MOST_DISPLACED or r.joined_step == e.step
            if tier.pool == p and lower and not spared:
                held += r.blocks
        total += held if p == pool else min(held, excess_blocks(s, p))
    return total


@compiled
def _lower_blocks(s: State, pool: int, weight: float) -> int:
    """Blocks of the pool's lower tiers that a newcomer may displace."""
    e = s.engine[0]
    lower = 0
    for slot in range(e.running):
        r = s.req[s.running[slot]]
        tier = s.tiers[r.tier]
        spared = r.preemptions >= MOST_DISPLACED or r.joined_step == e.step
        if tier.pool == pool and tier.weight < weight and not spared:
            lower += r.blocks
    return lower


@compiled
def room_for(s: State, row: int, need: int) -> int:
    """Are `need` blocks free for a waiting request, can they be made free, or neither?"""
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    e.room_way = _NOBODY
    # Each decode needs at most one block in this step; more is a cushion against preemptions.
    headroom = e.headroom_blocks * e.decoding
    if e.rule_pools == 0:
        return HAS_ROOM if need + headroom <= free_blocks(s) else NO_ROOM
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
        return HAS_ROOM
    e.goal_blocks = need + e.decoding
    if verdict == CALL_BACK:
        short = e.goal_blocks - free_blocks(s)
        if short > 0 and recoverable_blocks(s, tier.pool, tier.weight) < short:
            e.claimed_blocks += need
            return NO_ROOM
        e.room_way = _CALL_BACK
        return MAKES_ROOM
    over = pool.held + e.goal_blocks - pool.guaranteed
    short = max(over, e.goal_blocks - free_blocks(s))
    if r.preemptions > 0 or _lower_blocks(s, tier.pool, tier.weight) < short:
        return NO_ROOM
    e.room_way = _DISPLACE
    return MAKES_ROOM


@compiled
def still_fits(s: State, number: int) -> bool:
    """Whether enough room has been made for the tier's candidate."""
    e, pool = s.engine[0], s.pools[s.tiers[number].pool]
    if free_blocks(s) < e.goal_blocks:
        return False
    return e.room_way == _CALL_BACK or pool.held + e.goal_blocks <= pool.guaranteed


@compiled
def room_victim(s: State, number: int) -> int:
    """Who makes room next; NONE if nobody is left, and then the need is a claim (rule 5)."""
    e, tier = s.engine[0], s.tiers[number]
    row = choose_victim(s, tier.pool, tier.weight, True, e.room_way == _DISPLACE)
    if row < 0 and e.room_way == _CALL_BACK:
        e.claimed_blocks += e.need_blocks
    return row
