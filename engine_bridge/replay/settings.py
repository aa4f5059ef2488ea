"""Puts an allocation into the replay's memory, and keeps its lease.

The projection to the plan's bounds is `trimtab.engine_bridge.limits`; nothing is judged here.
"""

from __future__ import annotations

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.layout import DECODING, State
from trimtab.engine_bridge.replay.lifecycle import sync
from trimtab.engine_bridge.rules import draft_lengths


@compiled
def close_accounts(s: State) -> None:
    """Book what runs at the old weights before new ones hold."""
    for slot in range(s.engine[0].running):
        if s.req[s.running[slot]].status == DECODING:
            sync(s, s.running[slot])


def put_allocation(s: State, allocation: Allocation, *, capacity: int) -> None:
    """Make an allocation hold from the next step on, atomically; `close_accounts` comes before.

    Args:
        s: The replay's memory.
        allocation: A lawful allocation of the same plan.
        capacity: Batch size that the engine was started with.
    """
    e = s.engine[0]
    s.tiers.weight[:] = allocation.weights
    s.tiers.prefill_share[:] = allocation.prefill_shares
    s.tiers.shed_at[:] = allocation.shed_at
    s.tiers.max_running[:] = allocation.max_running
    draft_lengths.allow(s.drafting, [min(n, int(e.draft_most)) for n in allocation.draft_tokens])
    s.classes.factor[:] = allocation.retention
    s.pools.fraction[:] = allocation.kv_fractions
    s.pools.guaranteed[:] = _whole_blocks(allocation.kv_fractions, int(e.total_blocks))
    e.budget = allocation.prefill_budget_tokens
    e.slack_fraction = allocation.slack_fraction
    e.low_share = allocation.low_tier_chunk_share
    e.max_seqs = min(allocation.max_num_seqs, capacity)
    e.epoch += 1


def _whole_blocks(fractions: tuple[float, ...], total: int) -> list[int]:
    """Fractions of the blocks in whole blocks that sum to the total: largest remainders first."""
    exact = [fraction * total for fraction in fractions]
    whole = [int(blocks) for blocks in exact]
    order = sorted(range(len(exact)), key=lambda p: (whole[p] - exact[p], p))
    for p in order[: total - sum(whole)]:
        whole[p] += 1
    return whole
