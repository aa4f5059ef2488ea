"""Who gives blocks back: finding victims among the running requests.

The order and the permissions are rule 6's (`rules.pools`), or vLLM's own under the stock rules.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.kv_cache import free_blocks
from trimtab.engine_bridge.replay.layout import FCFS, NONE, State
from trimtab.engine_bridge.rules.fair_queue import tier_start_ms
from trimtab.engine_bridge.rules.pools import (
    MOST_DISPLACED,
    SPARED_AT_CAP,
    loss_class,
    may_yield,
    yields_before,
)

_LAST = 64
"""More than any loss class: who has given way often yields after all others of its tier."""


@compiled
def computed_now(s: State, row: int) -> int:
    """Tokens whose KV a running request holds at this step."""
    r = s.req[row]
    if r.status == 3:
        return r.computed + s.engine[0].step - r.sync_step
    return r.computed


@inlined
def excess_blocks(s: State, pool: int) -> int:
    """Blocks that a pool holds beyond its guarantee, at least 0."""
    return max(0, s.pools[pool].held - s.pools[pool].guaranteed)


@compiled
def choose_victim(s: State, pool: int, weight: float, newcomer: bool, own_only: bool) -> int:
    """Rule 6's victim for a request of `pool` and tier weight `weight`; NONE if nobody may yield.

    A `newcomer` never displaces its own pool's equals, nor who has given way often; `own_only`
    looks inside the requester's pool only.
    """
    e = s.engine[0]
    best = NONE
    best_excess, best_weight, best_loss, best_finish = 0, 0.0, 0, 0.0
    for slot in range(e.running):
        row = s.running[slot]
        r = s.req[row]
        tier = s.tiers[r.tier]
        same = tier.pool == pool
        excess = excess_blocks(s, tier.pool) if e.rule_pools == 1 else 1
        if own_only and not same:
            continue
        if r.joined_step == e.step:
            # Its blocks may be found already for what this step is yet to compute.
            continue
        if newcomer and (r.preemptions >= MOST_DISPLACED or (same and tier.weight >= weight)):
            continue
        if not may_yield(tier.weight, weight, same, excess):
            continue
        loss = loss_class(computed_now(s, row), e.block_size) + r.preemptions
        if r.preemptions >= MOST_DISPLACED:
            loss += _LAST
        if best == NONE or yields_before(
            excess,
            tier.weight,
            loss,
            r.finish_tag_ms,
            best_excess,
            best_weight,
            best_loss,
            best_finish,
        ):
            best, best_excess, best_weight = row, excess, tier.weight
            best_loss, best_finish = loss, r.finish_tag_ms
    return best


@compiled
def cap_victim(s: State, weight: float, start_ms: float) -> int:
    """Whom a waiting request displaces at the batch cap; NONE if nobody.

    Of the strictly lower tiers the lowest, and of those the request that loses least computed work;
    who was displaced often comes last.
    A tier whose virtual start is not above `start_ms`, the newcomer's, is served below its share
    (rule 1) and keeps its places, so that its turn comes.
    """
    e = s.engine[0]
    best, best_weight, best_often, best_loss, best_finish = NONE, weight, 0, 0, 0.0
    for slot in range(e.running):
        row = s.running[slot]
        r = s.req[row]
        tier = s.tiers[r.tier]
        if tier.weight >= weight or tier.weight > best_weight or tier_start_ms(tier) <= start_ms:
            continue
        if r.joined_step == e.step:
            continue
        often = max(0, r.preemptions - SPARED_AT_CAP + 1)
        loss = computed_now(s, row)
        if tier.weight == best_weight and often > best_often:
            continue
        if (
            tier.weight < best_weight
            or often < best_often
            or yields_before(0, 0.0, loss, r.finish_tag_ms, 0, 0.0, best_loss, best_finish)
        ):
            best, best_weight, best_often = row, tier.weight, often
            best_loss, best_finish = loss, r.finish_tag_ms
    return best


@inlined
def growth_blocks(s: State) -> int:
    """New blocks that this step's decodes need."""
    e = s.engine[0]
    phase = e.step % e.block_size
    need = 0
    for pool in range(s.grow.shape[0]):
        need += s.grow[pool, phase]
    return need


@compiled
def _neediest_tier(s: State) -> int:
    """The highest-weight tier whose decodes find no block if higher tiers are served first."""
    e = s.engine[0]
    phase = e.step % e.block_size
    free, below = free_blocks(s), np.inf
    while True:
        tier, weight = NONE, 0.0
        for t in range(len(s.tiers)):
            if s.tiers[t].weight < below and s.tiers[t].weight > weight:
                tier, weight = t, s.tiers[t].weight
        if tier == NONE:
            return NONE
        for t in range(len(s.tiers)):
            if s.tiers[t].weight == weight and s.tier_grow[t, phase] > 0:
                free -= s.tier_grow[t, phase]
                tier = t
                if free < 0:
                    return tier
        below = weight


@compiled
def last_in_batch(s: State) -> int:
    """The stock rules' victim: the latest admitted (fcfs), or the least urgent (priority)."""
    e = s.engine[0]
    best = s.running[0]
    for slot in range(1, e.running):
        row = s.running[slot]
        r, b = s.req[row], s.req[best]
        if e.mode == FCFS:
            later = r.admission > b.admission
        else:
            later = r.tier > b.tier or (r.tier == b.tier and r.arrived_s > b.arrived_s)
            if r.tier == b.tier and r.arrived_s == b.arrived_s:
                # vLLM takes the first of equals in the order of its batch.
                later = r.admission < b.admission
        if later:
            best = row
    return best


@inlined
def growth_victim(s: State) -> int:
    """Who gives way under the fair rules so that this step's decodes find their blocks.

    NONE if they find them.
    """
    if growth_blocks(s) <= free_blocks(s):
        return NONE
    tier = s.tiers[_neediest_tier(s)]
    row = choose_victim(s, tier.pool, tier.weight, False, False)
    return row if row != NONE else last_in_batch(s)
