"""Blocks of the replayed KV cache: held, cached for reuse, or empty.

It does as vLLM V1's block pool: prefix reuse by whole blocks, tail freed first, cached until
reused. A block whose content several requests name is an item of its own, findable from the moment
that it is named, in several copies if several computed it. What nobody else can ever find is only
counted: held by a request, or idle as one item, a run. It decides nothing: `rules.pools` says who
may take blocks, `cached_items` which cached ones go first.

With `engine.external` the blocks are another engine's (vLLM's): the functions that move blocks keep
only the request's own numbers, and whoever drives the plan puts the true counts into the state.

Invariant: empty + cached + the pools' held blocks = total; a block shared by several requests is
held once, charged to one of their pools.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.cached_items import evict, fall_idle, learn_reuse, wake
from trimtab.engine_bridge.replay.layout import FAIR, NONE, State
from trimtab.engine_bridge.replay.names import content_of, drop_item, name_answer, new_item

_GHOSTS = 4
"""Evicted blocks, in caches, that are remembered by their names."""


@inlined
def free_blocks(s: State) -> int:
    """Blocks that no running request holds."""
    e = s.engine[0]
    return e.empty_blocks + e.cached_blocks


@inlined
def note_misses(s: State, row: int) -> None:
    """Learn from what a request would have found, had it not been evicted of late.

    Without it a class that is evicted too early never shows that it comes back.
    """
    if s.engine[0].external == 1:
        return
    e, r = s.engine[0], s.req[row]
    most = min(r.named_total, r.target // e.block_size)
    start = 0
    for place in range(r.prefix_start, r.prefix_start + r.prefix_count):
        run = int(s.prefix_ids[place])
        size = int(s.run_blocks[run])
        for k in range(max(0, r.named_blocks - start), min(size, most - start)):
            content = s.run_first[run] + k
            kind = int(s.ghost_kind[content])
            if kind == NONE:
                continue
            if e.evicted_blocks - s.ghost_mark[content] <= _GHOSTS * e.total_blocks:
                learn_reuse(s, kind, 1, -1)
            s.ghost_kind[content] = NONE
        start += size


@inlined
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


@inlined
def find_cached(s: State, row: int) -> tuple[int, int, int]:
    """What a request would find cached now.

    At least one token is left to compute, as in vLLM.

    Returns:
        Named blocks found, blocks found in the request's own run, and how many of all these are
        idle now.
    """
    e, r = s.engine[0], s.req[row]
    if e.caching == 0:
        return 0, 0, 0
    most = (r.target - 1) // e.block_size
    # The stock rules look when the decodes have named what they fill in this step.
    ahead = 1 if e.grown_step == e.step and e.mode != FAIR else 0
    named, idle = 0, 0
    for place in range(r.prefix_start, r.prefix_start + r.prefix_count):
        run = int(s.prefix_ids[place])
        for content in range(
            s.run_first[run], s.run_first[run] + min(int(s.run_blocks[run]), most - named)
        ):
            number = int(s.first_item[content])
            if number == NONE:
                name_answer(s, content, ahead)
                number = int(s.first_item[content])
                if number == NONE:
                    return named, 0, idle
            if s.items[number].refs == 0:
                idle += 1
            named += 1
        if named == most:
            break
    own = 0
    if r.own_item != NONE and named == r.named_total:
        own = min(s.items[r.own_item].blocks, most - named)
        idle += own
    return named, own, idle


@inlined
def look_up(s: State, row: int) -> None:
    """Put what a request would find cached now into its `found_*` fields."""
    if s.engine[0].external == 1:
        return
    r = s.req[row]
    named, own, idle = find_cached(s, row)
    r.found_blocks = named + own
    r.found_own = own
    r.found_idle = idle


@inlined
def hold_cached(s: State, row: int) -> None:
    """Take what `look_up` found for the request: idle blocks become held."""
    e, r = s.engine[0], s.req[row]
    if e.external == 1:
        r.blocks = r.found_blocks
        return
    own = r.found_own
    named = r.found_blocks - own
    pool = s.tiers[r.tier].pool
    if r.named_total > 0:
        e.free_tables -= 1
        r.table = s.free_tables[e.free_tables]
    for block in range(named):
        number = int(s.first_item[content_of(s, row, block)])
        item = s.items[number]
        if item.refs == 0:
            learn_reuse(s, item.kind, 1, 0)
            wake(s, number)
            item.charge = pool
            s.pools[pool].held += 1
        item.refs += 1
        if r.preemptions == 0:
            # Who comes back to its own blocks does not show that others do.
            item.reused = 1
        s.pool_refs[number, pool] += 1
        s.tables[r.table, block] = number
    r.named_blocks = named
    r.blocks = named + own
    if own > 0:
        number = r.own_item
        item = s.items[number]
        for _ in range(own):
            learn_reuse(s, item.kind, 1, 0)
        if item.blocks == own:
            wake(s, number)
            drop_item(s, number)
        else:
            item.blocks -= own
            s.classes[item.kind].blocks -= own
            e.cached_blocks -= own
        s.pools[pool].held += own
    # What is left of its own run it computes anew; the old blocks lie there until they are reused.
    r.own_item = NONE


@inlined
def _let_go(s: State, number: int, pool: int, tier: int, stop: int) -> None:
    """Drop one request's hold on an item; the charge moves to a pool that still holds it."""
    item = s.items[number]
    item.refs -= 1
    s.pool_refs[number, pool] -= 1
    if item.refs == 0:
        s.pools[item.charge].held -= item.blocks
        fall_idle(s, number, tier, stop)
    elif s.pool_refs[number, item.charge] == 0:
        s.pools[item.charge].held -= item.blocks
        for p in range(s.pool_refs.shape[1]):
            if s.pool_refs[number, p] > 0:
                item.charge = p
                break
        s.pools[item.charge].held += item.blocks


@inlined
def release(s: State, row: int, tokens: int) -> None:
    """Give back all blocks of a request that stops, tail reused first.

    The full ones of its first `tokens` tokens, which `name_blocks` has seen, stay cached.
    """
    e, r = s.engine[0], s.req[row]
    if e.external == 1:
        r.blocks = 0
        return
    pool = s.tiers[r.tier].pool
    unnamed = r.blocks - r.named_blocks
    s.pools[pool].held -= unnamed
    kept = 0
    if e.caching == 1:
        kept = min(unnamed, max(0, tokens // e.block_size - r.named_blocks))
    e.empty_blocks += unnamed - kept
    if kept > 0:
        r.own_item = new_item(s, -1 - row, kept, pool)
        fall_idle(s, r.own_item, r.tier, r.stop)
    for block in range(r.named_blocks - 1, -1, -1):
        _let_go(s, int(s.tables[r.table, block]), pool, r.tier, r.stop)
    if r.named_total > 0:
        s.free_tables[e.free_tables] = r.table
        e.free_tables += 1
    r.groups = 0
    r.span_blocks = 0
    r.named_blocks = 0
    r.blocks = 0
