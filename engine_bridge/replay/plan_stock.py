"""What one step of stock vLLM V1 (0.33) carries, under `fcfs` or `priority`.

Running requests first, the chunk of the one that is still prefilling next, then the head of the
waiting queue until the token budget, the batch cap or the blocks run out; no admission in a step
that preempted. Whole prompts must fit the free blocks to be admitted, as by vLLM's
`scheduler_reserve_full_isl`.
"""

from __future__ import annotations

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.kv_cache import free_blocks, look_up, take_blocks
from trimtab.engine_bridge.replay.layout import FCFS, NONE, PREFILLING, State
from trimtab.engine_bridge.replay.lifecycle import admit, preempt, resumed_list
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


@compiled
def _continue_prefills(s: State, budget: int) -> tuple[int, bool]:
    """Give running prefills their next chunk; tokens granted, and whether anybody was preempted."""
    e = s.engine[0]
    granted, preempted, at = 0, False, 0
    while at < e.prefilling and granted < budget:
        row = s.prefilling[at]
        r = s.req[row]
        chunk = min(r.target - r.computed, budget - granted)
        need = -(-(r.computed + chunk) // e.block_size) - r.blocks
        while need + growth_blocks(s) > free_blocks(s) and r.status == PREFILLING:
            preempt(s, last_in_batch(s))
            preempted = True
        if r.status != PREFILLING:
            continue
        if need > 0:
            take_blocks(s, r.tier, need)
            r.blocks += need
        r.grant = chunk
        granted += chunk
        at += 1
    return granted, preempted


@compiled
def plan_stock(s: State, preempted: bool) -> int:
    """Set every `grant` of the step; returns the prefill tokens granted."""
    e = s.engine[0]
    budget = e.max_tokens - e.decoding
    granted, more = _continue_prefills(s, budget)
    if preempted or more:
        return granted
    while e.waiting > 0 and granted < budget and e.running < e.max_seqs:
        row = _head(s)
        r = s.req[row]
        look_up(s, row)
        computed = min(r.found_blocks * e.block_size, r.target - 1)
        chunk = min(r.target - computed, budget - granted)
        fresh = -(-r.target // e.block_size) - r.found_blocks
        if fresh + r.found_idle + growth_blocks(s) > free_blocks(s):
            break
        admit(s, row, computed + chunk)
        r.grant = chunk
        granted += chunk
    return granted
