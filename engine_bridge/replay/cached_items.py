"""Cached blocks that nobody holds: their retention classes, and which of them are emptied first.

The order is rule 7's (`rules.retention`). Who takes and gives back blocks, `kv_cache` tells.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.layout import NONE, State
from trimtab.engine_bridge.rules.retention import goes_before, reuse_rate, scaled_age

_PRIOR = 0.01
"""Blocks of good faith for a class's reuse, share of the cache."""
_COMES_BACK = 0.25
"""Reuse from which a class counts as content that is come back for."""
_MEMORY = 2.0
"""Blocks seen, in caches, after which what is known of a class's reuse counts half."""


@compiled
def new_item(s: State, prefix: int, blocks: int, pool: int) -> int:
    """A new item of a content, or of a request's own blocks (`prefix` -1 - row), held by nobody."""
    e = s.engine[0]
    e.free_items -= 1
    number = s.free_items[e.free_items]
    item = s.items[number]
    item.prefix = prefix
    item.blocks = blocks
    item.refs = 0
    item.charge = pool
    item.reused = 0
    item.next = NONE
    item.prev = NONE
    item.same = NONE
    for p in range(s.pool_refs.shape[1]):
        s.pool_refs[number, p] = 0
    if prefix >= 0:
        # Equal content may exist twice; the copy that was named first is found, as in vLLM.
        if s.first_item[prefix] == NONE:
            s.first_item[prefix] = number
        else:
            last = int(s.first_item[prefix])
            while s.items[last].same != NONE:
                last = s.items[last].same
            s.items[last].same = number
    return number


@compiled
def drop_item(s: State, number: int) -> None:
    """Forget an item that is in no list any more; its content is not found by it again."""
    e, item = s.engine[0], s.items[number]
    if item.prefix >= 0:
        if s.first_item[item.prefix] == number:
            s.first_item[item.prefix] = item.same
        else:
            before = int(s.first_item[item.prefix])
            while s.items[before].same != number:
                before = s.items[before].same
            s.items[before].same = item.same
    elif s.req[-1 - item.prefix].own_item == number:
        s.req[-1 - item.prefix].own_item = NONE
    s.free_items[e.free_items] = number
    e.free_items += 1


@compiled
def fall_idle(s: State, number: int, tier: int, stop: int) -> None:
    """Append an item to its class's list: cached from now on, held by nobody."""
    e, item = s.engine[0], s.items[number]
    kind = s.class_of[tier, stop, item.reused]
    at = s.classes[kind]
    item.kind = kind
    item.idle_s = e.now_s
    item.sequence = e.sequence
    e.sequence += 1
    item.next = NONE
    item.prev = at.tail
    if at.tail == NONE:
        at.head = number
    else:
        s.items[at.tail].next = number
    at.tail = number
    at.blocks += item.blocks
    e.cached_blocks += item.blocks


@compiled
def wake(s: State, number: int) -> None:
    """Take an item out of its class's list."""
    item = s.items[number]
    at = s.classes[item.kind]
    if item.prev == NONE:
        at.head = item.next
    else:
        s.items[item.prev].next = item.next
    if item.next == NONE:
        at.tail = item.prev
    else:
        s.items[item.next].prev = item.prev
    at.blocks -= item.blocks
    s.engine[0].cached_blocks -= item.blocks


@compiled
def _reuse(s: State, kind: int) -> float:
    """Share of a class's idle blocks that come back, as far as it is known."""
    at = s.classes[kind]
    return reuse_rate(at.woken, at.lost, _PRIOR * s.engine[0].total_blocks)


@compiled
def learn_reuse(s: State, kind: int, woken: int, lost: int) -> None:
    """Count blocks of a class that were asked for again, or evicted; the past fades."""
    at = s.classes[kind]
    at.woken += woken
    at.lost = max(0.0, at.lost + lost)
    if at.woken + at.lost > _MEMORY * s.engine[0].total_blocks:
        at.woken *= 0.5
        at.lost *= 0.5


@compiled
def _lose(s: State, kind: int, most: int) -> int:
    """Count evicted blocks of a class, up to `most` or until the past fades; how many."""
    at, limit = s.classes[kind], _MEMORY * s.engine[0].total_blocks
    gone = 0
    while gone < most:
        gone += 1
        learn_reuse(s, kind, 0, 1)
        if at.woken + at.lost <= 0.5 * limit:
            # It may just have faded, which can change the class's turn.
            break
    return gone


@compiled
def kept_blocks(s: State, pool: int, weight: float) -> int:
    """Cached blocks that a pool beyond its guarantee may not borrow for a tier of that weight.

    What higher tiers of other pools cache inside their pools' guarantees, as far as it is known to
    come back: lending it would cost its owner more than the borrower gains. None without learned
    reuse.
    """
    total = 0
    if s.engine[0].learn_reuse == 0:
        return total
    for p in range(len(s.pools)):
        cached = 0.0
        for kind in range(len(s.classes)):
            tier = s.tiers[s.classes[kind].tier]
            if tier.pool == p and p != pool and tier.weight > weight:
                cached += s.classes[kind].blocks * _reuse(s, kind)
        total += min(int(cached), max(0, s.pools[p].guaranteed - s.pools[p].held))
    return total


@compiled
def _over_quota(s: State, kind: int) -> float:
    """Blocks that the class's pool caches and holds beyond its guarantee, at least 0."""
    pool = s.tiers[s.classes[kind].tier].pool
    kept = s.pools[pool].held
    for k in range(len(s.classes)):
        if s.tiers[s.classes[k].tier].pool == pool:
            kept += s.classes[k].blocks
    return max(0.0, float(kept - s.pools[pool].guaranteed))


@compiled
def _spared(s: State, kind: int, weight: float) -> bool:
    """Whether a tier of that weight leaves a class alone while there is other content.

    What higher tiers cache inside their pool's guarantee and come back for.
    """
    tier = s.tiers[s.classes[kind].tier]
    if s.engine[0].learn_reuse == 0 or tier.weight <= weight:
        return False
    pool = s.pools[tier.pool]
    return pool.held <= pool.guaranteed and _reuse(s, kind) >= _COMES_BACK


@compiled
def _next_class(s: State, weight: float) -> int:
    """The class whose oldest item is reused next (rule 7) for a tier of that weight."""
    e = s.engine[0]
    best, best_age, best_sequence, best_rank, best_over = NONE, 0.0, 0, 0, 0.0
    for kind in range(len(s.classes)):
        at = s.classes[kind]
        if at.head == NONE or _spared(s, kind, weight):
            continue
        item = s.items[at.head]
        factor = at.factor
        if e.learn_reuse == 1:
            factor *= _reuse(s, kind)
        age = scaled_age(e.now_s, item.idle_s, factor)
        over = _over_quota(s, kind) if e.eviction == 3 else 0.0
        if best == NONE or goes_before(
            e.eviction,
            age,
            item.sequence,
            at.rank,
            over,
            best_age,
            best_sequence,
            best_rank,
            best_over,
        ):
            best, best_age, best_sequence = kind, age, item.sequence
            best_rank, best_over = at.rank, over
    return best


@compiled
def evict(s: State, blocks: int, weight: float) -> None:
    """Empty that many cached blocks for a tier of that weight, in rule 7's order, tails first.

    Block by block, as what is learned from one may change which class loses the next. The caller
    has checked that as many are cached.
    """
    e = s.engine[0]
    while blocks > 0:
        kind = _next_class(s, weight)
        if kind == NONE:
            kind = _next_class(s, np.inf)
        number = s.classes[kind].head
        item = s.items[number]
        gone = _lose(s, kind, min(blocks, item.blocks))
        blocks -= gone
        e.empty_blocks += gone
        e.evicted_blocks += gone
        if gone < item.blocks:
            item.blocks -= gone
            s.classes[kind].blocks -= gone
            e.cached_blocks -= gone
            continue
        content = item.prefix
        wake(s, number)
        drop_item(s, number)
        if content >= 0 and s.first_item[content] == NONE:
            s.ghost_kind[content] = kind
            s.ghost_mark[content] = e.evicted_blocks
