"""Cached blocks that nobody holds: their retention classes, and which of them are emptied first.

The order is rule 7's (`rules.retention`). Who takes and gives back blocks, `kv_cache` tells.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.layout import NONE, State
from trimtab.engine_bridge.replay.names import drop_item, name_answer
from trimtab.engine_bridge.rules.retention import (
    FIXED_QUOTA,
    faded,
    goes_before,
    reuse_rate,
    scaled_age,
)

_PRIOR = 0.01
"""Blocks of good faith for a class's reuse, share of the cache."""
_COMES_BACK = 0.25
"""Reuse from which a class counts as content that is come back for."""
_MEMORY = 2.0
"""Blocks seen, in caches, after which what is known of a class's reuse counts half."""


@inlined
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


@inlined
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


@inlined
def _reuse(s: State, kind: int) -> float:
    """Share of a class's idle blocks that come back, as far as it is known."""
    at = s.classes[kind]
    return reuse_rate(at.woken, at.lost, _PRIOR * s.engine[0].total_blocks)


@inlined
def learn_reuse(s: State, kind: int, woken: int, lost: int) -> None:
    """Count blocks of a class that were asked for again, or evicted; the past fades."""
    at = s.classes[kind]
    at.woken += woken
    at.lost = max(0.0, at.lost + lost)
    by = faded(at.woken, at.lost, _MEMORY * s.engine[0].total_blocks)
    at.woken *= by
    at.lost *= by


@inlined
def _lose(s: State, kind: int, most: int) -> int:
    """Count evicted blocks of a class, up to `most` or until it may not be its turn; how many.

    What is lost hastens its turn, unless the past fades; quotas count each block.
    """
    if s.engine[0].eviction == FIXED_QUOTA:
        most = 1
    at, remembered = s.classes[kind], _MEMORY * s.engine[0].total_blocks
    woken, lost, gone, by = at.woken, at.lost, 0, 1.0
    # One by one, as floats round; in local variables, as runs are long.
    while gone < most and by == 1.0:
        lost += 1.0
        by = faded(woken, lost, remembered)
        gone += 1
    at.woken = woken * by
    at.lost = lost * by
    return gone


@inlined
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


@inlined
def _spared(s: State, kind: int, weight: float) -> bool:
    """Whether a tier of that weight leaves a class alone while there is other content.

    What higher tiers cache inside their pool's guarantee and come back for.
    """
    tier = s.tiers[s.classes[kind].tier]
    if s.engine[0].learn_reuse == 0 or tier.weight <= weight:
        return False
    pool = s.pools[tier.pool]
    return pool.held <= pool.guaranteed and _reuse(s, kind) >= _COMES_BACK


@inlined
def _scaled(s: State, kind: int) -> float:
    """Scaled age of a class's oldest item, seconds."""
    at = s.classes[kind]
    factor = at.factor
    if s.engine[0].learn_reuse == 1:
        factor *= _reuse(s, kind)
    return scaled_age(s.engine[0].now_s, s.items[at.head].idle_s, factor)


@inlined
def _goes_first(s: State, kind: int, age: float, than: int, than_age: float) -> bool:
    """Whether rule 7 empties one class's oldest item before another's, given their ages."""
    e, at, other = s.engine[0], s.classes[kind], s.classes[than]
    over, than_over = 0.0, 0.0
    if e.eviction == FIXED_QUOTA:
        over, than_over = _over_quota(s, kind), _over_quota(s, than)
    return goes_before(
        e.eviction,
        age,
        s.items[at.head].sequence,
        at.rank,
        over,
        than_age,
        s.items[other.head].sequence,
        other.rank,
        than_over,
    )


@inlined
def _next_class(s: State, weight: float) -> tuple[int, int, float]:
    """The class whose oldest item is reused next (rule 7) for a tier of that weight.

    Returns:
        The class, NONE if there is none; the one that would be next without it, and its age.
    """
    best, best_age, rival, rival_age = NONE, 0.0, NONE, 0.0
    for kind in range(len(s.classes)):
        if s.classes[kind].head == NONE or _spared(s, kind, weight):
            continue
        age = _scaled(s, kind)
        if best == NONE or _goes_first(s, kind, age, best, best_age):
            rival, rival_age = best, best_age
            best, best_age = kind, age
        elif rival == NONE or _goes_first(s, kind, age, rival, rival_age):
            rival, rival_age = kind, age
    return best, rival, rival_age


@inlined
def _stays_next(s: State, kind: int, weight: float, rival: int, rival_age: float) -> bool:
    """Whether the class that has just lost blocks loses the next ones too.

    Nothing has changed for the others, but under quotas, which count what their pools cache.
    """
    if s.engine[0].eviction == FIXED_QUOTA or s.classes[kind].head == NONE:
        return False
    if _spared(s, kind, weight):
        return False
    return rival == NONE or _goes_first(s, kind, _scaled(s, kind), rival, rival_age)


@inlined
def _empty_oldest(s: State, kind: int, most: int) -> int:
    """Empty up to that many blocks of a class's oldest item; how many."""
    e, at = s.engine[0], s.classes[kind]
    number = int(at.head)
    item = s.items[number]
    gone = _lose(s, kind, min(most, int(item.blocks)))
    e.empty_blocks += gone
    e.evicted_blocks += gone
    if gone < item.blocks:
        item.blocks -= gone
        at.blocks -= gone
        e.cached_blocks -= gone
        return gone
    content = int(item.prefix)
    wake(s, number)
    drop_item(s, number)
    if content < 0:
        return gone
    if s.first_item[content] == NONE and e.learn_reuse == 1:
        # A copy of it in a running answer can still be found.
        name_answer(s, content, 0)
    if s.first_item[content] == NONE:
        s.ghost_kind[content] = kind
        s.ghost_mark[content] = e.evicted_blocks
    return gone


@compiled
def evict(s: State, blocks: int, weight: float) -> None:
    """Empty that many cached blocks for a tier of that weight, in rule 7's order, tails first.

    Item by item, as what is learned from one may change which class loses the next. The caller has
    checked that as many are cached.
    """
    while blocks > 0:
        kind, rival, rival_age = _next_class(s, weight)
        if kind == NONE:
            # All are spared: what one loses may end that, so look at all of them each time.
            kind, _, _ = _next_class(s, np.inf)
            blocks -= _empty_oldest(s, kind, blocks)
            continue
        blocks -= _empty_oldest(s, kind, blocks)
        while blocks > 0 and _stays_next(s, kind, weight, rival, rival_age):
            blocks -= _empty_oldest(s, kind, blocks)
