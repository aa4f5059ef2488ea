"""What one step of stock vLLM V1 (0.33) carries, under `fcfs` or `priority`.

Decision for decision as vLLM's own scheduler (`benchmarks/parity.py` compares them). Running
requests first, the chunk of the one that is still prefilling last of them, then the head of the
waiting queue until the token budget, the batch cap or the blocks run out; no admission in a step
that preempted. Whole prompts must fit the free blocks to be admitted, as by vLLM's
`scheduler_reserve_full_isl`.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.encoding import drop_items, hold_items, open_items
from trimtab.engine_bridge.replay.kv_cache import (
    free_blocks,
    look_up,
    take_blocks,
    take_growth,
)
from trimtab.engine_bridge.replay.layout import (
    DECODING,
    ENCODED,
    FCFS,
    NONE,
    PREFILLING,
    PRIORITY,
    State,
)
from trimtab.engine_bridge.replay.lifecycle import admit, preempt, resumed_list
from trimtab.engine_bridge.replay.names import name_blocks
from trimtab.engine_bridge.replay.padding import padding
from trimtab.engine_bridge.replay.victims import growth_blocks, last_in_batch


@compiled
def _head(s: State) -> int:
    if s.engine[0].mode == FCFS:
        return s.lists[0].head
    for tier in range(len(s.tiers)):
        head = s.lists[resumed_list(s, tier)].head
        if head != NONE:
            return head
    return NONE


@inlined
def _after(s: State, row: int) -> int:
    """Who waits behind a request."""
    following = int(s.req[row].next)
    if s.engine[0].mode == PRIORITY:
        tier = int(s.req[row].tier) + 1
        while following == NONE and tier < len(s.tiers):
            following = int(s.lists[resumed_list(s, tier)].head)
            tier += 1
    return following


@compiled
def _grow_in_order(s: State) -> None:
    """Give decodes their blocks when there are not enough, request by request as vLLM does.

    Who is short preempts the last in rank, and if that is itself, goes without. A victim may have
    had its block in this step already; `grant` marks those that did.
    """
    e = s.engine[0]
    count = e.running
    admissions = np.zeros(count, np.int64)
    for slot in range(count):
        admissions[slot] = s.req[s.running[slot]].admission
    order = np.argsort(admissions)
    for slot in range(count):
        s.due[slot] = s.running[order[slot]]
    for at in range(count):
        row = s.due[at]
        r = s.req[row]
        if r.status != DECODING:
            continue
        computed = r.computed + e.step - r.sync_step
        held = max(r.blocks, -(-computed // e.block_size))
        need = -(-(computed + 1 + r.ahead) // e.block_size) - held
        while need > free_blocks(s) and r.status == DECODING:
            preempt(s, last_in_batch(s))
        if r.status == DECODING:
            take_blocks(s, r.tier, max(0, need))
            r.grant = 1
    for slot in range(e.running):
        r = s.req[s.running[slot]]
        if r.status == DECODING:
            r.grant = 0
    e.grown_step = e.step


@compiled
def _continue_prefills(s: State) -> tuple[int, bool]:
    """Give running prefills their next chunk; tokens granted, and whether anybody was preempted.

    What a victim had of the step is there for others again.
    """
    e = s.engine[0]
    granted, preempted, at = 0, False, 0
    budget = e.max_tokens - e.decoding - e.ahead
    while at < e.prefilling and granted < budget:
        row = s.prefilling[at]
        r = s.req[row]
        chunk = min(r.target - r.computed, budget - granted)
        if e.encoding == 1:
            chunk = hold_items(s, row, r.computed, chunk)
            if chunk == 0:
                at += 1
                continue
        need = -(-(r.computed + chunk) // e.block_size) - r.blocks
        while need > free_blocks(s) and r.status == PREFILLING:
            victim = last_in_batch(s)
            v = s.req[victim]
            if victim == row:
                # It gives way before vLLM has taken its items for encoded.
                drop_items(s, row, True)
            elif v.status == PREFILLING and v.admission < r.admission:
                # Those behind it move up, and have the tokens that it had in this step.
                at -= 1
                granted -= v.grant
            preempt(s, victim)
            budget = e.max_tokens - e.decoding - e.ahead
            preempted = True
        if r.status != PREFILLING:
            continue
        if need > 0:
            take_blocks(s, r.tier, need)
            r.blocks += need
        name_blocks(s, row, r.computed + chunk, True)
        r.grant = chunk
        granted += chunk
        at += 1
    return granted, preempted


@compiled
def plan_stock(s: State) -> int:
    """Take the decodes' blocks and set every `grant` of the step; the prefill tokens granted."""
    e = s.engine[0]
    short = growth_blocks(s) > free_blocks(s)
    if short:
        _grow_in_order(s)
    else:
        take_growth(s)
    s.totals[ENCODED] = 0.0
    granted, preempted = _continue_prefills(s)
    if short or preempted:
        return granted
    budget = e.max_tokens - e.decoding - e.ahead
    continued = granted
    following = _head(s)
    while following != NONE and granted < budget and e.running < e.max_seqs:
        row = following
        following = _after(s, row)
        r = s.req[row]
        look_up(s, row)
        computed = r.found_blocks * e.block_size
        chunk = min(r.target - computed, budget - granted)
        # vLLM pads where no running prefill has a chunk.
        more = 0
        if continued == 0 and (computed > 0 or e.decoding > 0):
            more = padding(s, row, computed)
        if more > budget - granted - chunk:
            break
        if e.encoding == 1:
            open_items(s, row, computed)
            chunk = hold_items(s, row, computed, chunk)
            if chunk == 0:
                continue
        held = max(r.target, computed + chunk + more)
        if -(-held // e.block_size) - r.found_blocks + r.found_idle > free_blocks(s):
            drop_items(s, row, True)
            break
        admit(s, row, computed + chunk + more)
        # Whoever is admitted next in this step finds these blocks already.
        name_blocks(s, row, computed + chunk, True)
        r.grant = chunk + more
        granted += chunk + more
    return granted
