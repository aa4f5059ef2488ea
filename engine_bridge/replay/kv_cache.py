"""Blocks of the replayed KV cache: held, cached for reuse, or empty.

It counts blocks as vLLM V1's block pool does (prefix reuse by whole blocks, tail freed first,
cached until reused) but keeps runs of blocks that live and die together as one item. It decides
nothing: `rules.pools` says who may take blocks, `rules.retention` which cached ones go first.

With `engine.external` the blocks are another engine's (vLLM's): the functions that move blocks keep
only the request's own numbers, and whoever drives the plan puts the true counts into the state.

Invariant: empty + cached + the pools' held blocks = total; a block shared by several requests is
held once, charged to one of their pools.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.layout import NONE, State
from trimtab.engine_bridge.rules.retention import goes_before, reuse_rate, scaled_age

_PRIOR = 0.01
"""Blocks of good faith for a class's reuse, share of the cache."""
_GHOSTS = 4
"""Evicted blocks, in caches, that are remembered by their names."""
_COMES_BACK = 0.25
"""Reuse from which a class counts as content that is come back for."""
_MEMORY = 2.0
"""Blocks seen, in caches, after which what is known of a class's reuse counts half."""


@compiled
def free_blocks(s: State) -> int:
    """Blocks that no running request holds."""
    e = s.engine[0]
    return e.empty_blocks + e.cached_blocks


@compiled
def _new_item(s: State, prefix: int, blocks: int, pool: int) -> int:
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
        # Equal content may exist twice; the older copy is found first, as in vLLM.
        if s.first_item[prefix] == NONE:
            s.first_item[prefix] = number
        else:
            last = int(s.first_item[prefix])
            while s.items[last].same != NONE:
                last = s.items[last].same
            s.items[last].same = number
    return number


@compiled
def _drop_item(s: State, number: int) -> None:
    e, item = s.engine[0], s.items[number]
    if item.prefix >= 0:
        if s.first_item[item.prefix] == number:
            s.first_item[item.prefix] = item.same
        else:
            before = int(s.first_item[item.prefix])
            while s.items[before].same != number:
                before = s.items[before].same
            s.items[before].same = item.same
    else:
        s.req[-1 - item.prefix].own_item = NONE
    s.free_items[e.free_items] = number
    e.free_items += 1


@compiled
def _fall_idle(s: State, number: int, tier: int, stop: int) -> None:
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
def _wake(s: State, number: int) -> None:
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
def _learn_reuse(s: State, kind: int, woken: int, lost: int) -> None:
    """Count blocks of a class that were asked for again, or evicted; the past fades."""
    at = s.classes[kind]
    at.woken += woken
    at.lost = max(0.0, at.lost + lost)
    if at.woken + at.lost > _MEMORY * s.engine[0].total_blocks:
        at.woken *= 0.5
        at.lost *= 0.5


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

    The caller has checked that as many are cached.
    """
    e = s.engine[0]
    while blocks > 0:
        kind = _next_class(s, weight)
        if kind == NONE:
            kind = _next_class(s, np.inf)
        number = s.classes[kind].head
        item = s.items[number]
        gone = min(blocks, item.blocks)
        blocks -= gone
        e.empty_blocks += gone
        e.evicted_blocks += gone
        _learn_reuse(s, kind, 0, gone)
        if gone == item.blocks:
            if item.prefix >= 0:
                s.ghost_kind[item.prefix] = kind
                s.ghost_mark[item.prefix] = e.evicted_blocks
            _wake(s, number)
            _drop_item(s, number)
        else:
            item.blocks -= gone
            s.classes[kind].blocks -= gone
            e.cached_blocks -= gone


@compiled
def note_misses(s: State, row: int) -> None:
    """Learn from what a request would have found, had it not been evicted of late.

    Without it a class that is evicted too early never shows that it comes back.
    """
    if s.engine[0].external == 1:
        return
    e, r = s.engine[0], s.req[row]
    place, span = r.groups, r.span_blocks
    while place < r.prefix_count and span * e.block_size < r.target:
        run = int(s.prefix_ids[r.prefix_start + place])
        kind = int(s.ghost_kind[run])
        if kind != NONE:
            if e.evicted_blocks - s.ghost_mark[run] <= _GHOSTS * e.total_blocks:
                size = int(s.run_blocks[run])
                _learn_reuse(s, kind, size, -size)
            s.ghost_kind[run] = NONE
        span += s.run_blocks[run]
        place += 1


@compiled
def take_growth(s: State) -> None:
    """Take the new blocks of this step's decodes, once a step; they are known to be free."""
    e = s.engine[0]
    if e.grown_step == e.step:
        return
    e.grown_step = e.step
    phase = e.step % e.block_size
    need = 0
    for p in range(len(s.pools)):
        more = s.grow[p, phase]
        if more > 0:
            pool = s.pools[p]
            if pool.held <= pool.guaranteed and pool.held + more > pool.guaranteed:
                # A pool that passes its guarantee lends nothing more: look at the queues again.
                e.epoch += 1
            pool.held += more
            need += more
    if e.external == 1:
        return
    if need > e.empty_blocks:
        # Of all that grow the lowest tier decides: the few blocks are not worth a split.
        weight = np.inf
        for t in range(len(s.tiers)):
            if s.tier_grow[t, phase] > 0:
                weight = min(weight, s.tiers[t].weight)
        evict(s, need - e.empty_blocks, weight)
    e.empty_blocks -= need


@compiled
def take_blocks(s: State, tier: int, blocks: int) -> None:
    """Hold that many blocks for a tier's pool; the caller has checked that they are free."""
    if s.engine[0].external == 1:
        return
    e, t = s.engine[0], s.tiers[tier]
    if blocks > e.empty_blocks:
        evict(s, blocks - e.empty_blocks, t.weight)
    e.empty_blocks -= blocks
    s.pools[t.pool].held += blocks


@compiled
def find_cached(s: State, row: int) -> tuple[int, int, int, int]:
    """What a request would find cached now.

    At least one token is left to compute, as in vLLM.

    Returns:
        Leading prefix ids found, blocks found in them, blocks found in the request's own run, and
        how many of all these are idle now.
    """
    e, r = s.engine[0], s.req[row]
    if e.caching == 0:
        return 0, 0, 0, 0
    most = (r.target - 1) // e.block_size
    groups, blocks, idle = 0, 0, 0
    while groups < r.prefix_count and blocks < most:
        run = int(s.prefix_ids[r.prefix_start + groups])
        number = int(s.first_item[run])
        if number == NONE:
            break
        item = s.items[number]
        found = min(item.blocks, most - blocks)
        groups += 1
        blocks += found
        if item.refs == 0:
            idle += item.blocks
        if item.blocks < s.run_blocks[run]:
            break
    own = 0
    if r.own_item != NONE and blocks == r.own_start:
        own = min(s.items[r.own_item].blocks, most - blocks)
        idle += own
    return groups, blocks, own, idle


@compiled
def look_up(s: State, row: int) -> None:
    """Put what a request would find cached now into its `found_*` fields."""
    if s.engine[0].external == 1:
        return
    r = s.req[row]
    groups, named, own, idle = find_cached(s, row)
    r.found_groups = groups
    r.found_blocks = named + own
    r.found_own = own
    r.found_idle = idle


@compiled
def hold_cached(s: State, row: int, groups: int, own: int) -> None:
    """Take what `find_cached` found for the request: idle items become held."""
    if s.engine[0].external == 1:
        s.req[row].blocks = s.req[row].found_blocks
        return
    e, r = s.engine[0], s.req[row]
    pool = s.tiers[r.tier].pool
    most = (r.target - 1) // e.block_size
    named, span = 0, 0
    for g in range(groups):
        run = int(s.prefix_ids[r.prefix_start + g])
        number = int(s.first_item[run])
        span += s.run_blocks[run]
        item = s.items[number]
        if item.refs == 0:
            _learn_reuse(s, item.kind, item.blocks, 0)
            _wake(s, number)
            item.charge = pool
            s.pools[pool].held += item.blocks
        item.refs += 1
        item.reused = 1
        s.pool_refs[number, pool] += 1
        s.held[r.prefix_start + g] = number
        known = min(item.blocks, most - named)
        named += known
        r.last_known = known
    r.groups = groups
    r.span_blocks = span
    r.named_blocks = named
    r.blocks = named
    if r.own_item != NONE:
        number = r.own_item
        kept = s.items[number].blocks
        _learn_reuse(s, s.items[number].kind, own, 0)
        _wake(s, number)
        _drop_item(s, number)
        s.pools[pool].held += own
        e.empty_blocks += kept - own
        r.blocks += own


@compiled
def _name(s: State, row: int, number: int, blocks: int) -> None:
    """Move unnamed blocks of the request into an item that it holds."""
    r, item = s.req[row], s.items[number]
    pool = s.tiers[r.tier].pool
    item.blocks += blocks
    s.pools[pool].held -= blocks
    s.pools[item.charge].held += blocks
    r.named_blocks += blocks
    r.last_known += blocks


@compiled
def name_blocks(s: State, row: int, tokens: int) -> None:
    """Make the full blocks of the first `tokens` tokens findable by their prefix ids."""
    if s.engine[0].external == 1:
        return
    e, r = s.engine[0], s.req[row]
    if e.caching == 0 or r.prefix_count == 0:
        return
    full = tokens // e.block_size
    if r.groups > 0:
        size = int(s.run_blocks[s.prefix_ids[r.prefix_start + r.groups - 1]])
        number = int(s.held[r.prefix_start + r.groups - 1])
        want = min(full - (r.span_blocks - size), size)
        # If somebody else has completed the item meanwhile, these blocks stay a private copy.
        if want > r.last_known and s.items[number].blocks == r.last_known:
            _name(s, row, number, want - r.last_known)
    pool = s.tiers[r.tier].pool
    while r.groups < r.prefix_count and r.span_blocks < full:
        run = int(s.prefix_ids[r.prefix_start + r.groups])
        size = int(s.run_blocks[run])
        number = _new_item(s, run, 0, pool)
        s.items[number].refs = 1
        s.pool_refs[number, pool] = 1
        s.held[r.prefix_start + r.groups] = number
        r.last_known = 0
        _name(s, row, number, min(size, full - r.span_blocks))
        r.groups += 1
        r.span_blocks += size


@compiled
def _let_go(s: State, number: int, pool: int, tier: int, stop: int) -> None:
    """Drop one request's hold on an item; the charge moves to a pool that still holds it."""
    item = s.items[number]
    item.refs -= 1
    s.pool_refs[number, pool] -= 1
    if item.refs == 0:
        s.pools[item.charge].held -= item.blocks
        _fall_idle(s, number, tier, stop)
    elif s.pool_refs[number, item.charge] == 0:
        s.pools[item.charge].held -= item.blocks
        for p in range(s.pool_refs.shape[1]):
            if s.pool_refs[number, p] > 0:
                item.charge = p
                break
        s.pools[item.charge].held += item.blocks


@compiled
def release(s: State, row: int) -> None:
    """Give back all blocks of a request that stops; full ones stay cached, tail reused first."""
    if s.engine[0].external == 1:
        s.req[row].blocks = 0
        return
    e, r = s.engine[0], s.req[row]
    pool = s.tiers[r.tier].pool
    unnamed = r.blocks - r.named_blocks
    s.pools[pool].held -= unnamed
    kept = 0
    if e.caching == 1:
        full = r.computed // e.block_size - r.named_blocks
        kept = min(unnamed, max(0, full))
    e.empty_blocks += unnamed - kept
    r.own_item = NONE
    if kept > 0:
        number = _new_item(s, -1 - row, kept, pool)
        r.own_item = number
        r.own_start = r.named_blocks
        _fall_idle(s, number, r.tier, r.stop)
    for g in range(r.groups - 1, -1, -1):
        _let_go(s, int(s.held[r.prefix_start + g]), pool, r.tier, r.stop)
    r.groups = 0
    r.span_blocks = 0
    r.last_known = 0
    r.named_blocks = 0
    r.blocks = 0
