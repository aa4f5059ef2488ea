"""Rules 5 and 6: whether a request may take blocks, and who gives blocks back.

It judges numbers of blocks; it moves none.
"""

from __future__ import annotations

from typing import Final

from trimtab.engine_bridge.compiled import compiled

ADMIT: Final = 0
"""The blocks are there."""
CALL_BACK: Final = 1
"""The pool is inside its guarantee: lent blocks must come back first."""
WAIT: Final = 2
"""The pool would borrow, and what is free is not idle."""


MOST_DISPLACED: Final = 4
"""A request that has given way this often is spared by newcomers."""
SPARED_AT_CAP: Final = 2
"""At the batch cap it is spared from this often on, as long as somebody else can give way."""
PLACES_A_SPARE: Final = 8
"""Of so many places in the batch at most one stays free for who would displace a returner."""


@compiled
def admission_verdict(
    need_blocks: int,
    free_blocks: int,
    claimed_blocks: int,
    headroom_blocks: int,
    held_blocks: int,
    guaranteed_blocks: int,
) -> int:
    """Rule 5 for one request: ADMIT, CALL_BACK or WAIT.

    Args:
        need_blocks: blocks that would become held.
        free_blocks: blocks that no running request holds.
        claimed_blocks: of them, those that are no pool's to borrow: requests inside their pool's
            guarantee wait for them, or they hold what higher tiers come back for.
        headroom_blocks: kept free for the growth of running requests.
        held_blocks: what the request's pool holds now.
        guaranteed_blocks: what the pool is guaranteed.
    """
    inside = held_blocks + need_blocks <= guaranteed_blocks
    usable = free_blocks - headroom_blocks
    if not inside:
        usable -= claimed_blocks
    if need_blocks <= usable:
        return ADMIT
    return CALL_BACK if inside else WAIT


@compiled
def may_yield(
    victim_weight: float,
    for_weight: float,
    same_pool: bool,
    excess_blocks: int,
) -> bool:
    """Whether rule 6 lets a running request give way.

    A higher-weight tier never yields to a lower one. Another pool's request yields only while its
    pool holds more than its guarantee.
    """
    if victim_weight > for_weight:
        return False
    return same_pool or excess_blocks > 0


@compiled
def loss_class(computed_tokens: int, block_size: int) -> int:
    """Rule 6's "least computed work lost": losses within a factor of two count as equal."""
    blocks, size = computed_tokens // block_size, 0
    while blocks > 0:
        blocks >>= 1
        size += 1
    return size


@compiled
def yields_before(
    excess: int,
    weight: float,
    loss: int,
    finish_ms: float,
    than_excess: int,
    than_weight: float,
    than_loss: int,
    than_finish_ms: float,
) -> bool:
    """Rule 6's order of victims.

    The pool furthest over its guarantee, the lowest-weight tier, the least work lost, the latest
    virtual finish.
    """
    if excess != than_excess:
        return excess > than_excess
    if weight != than_weight:
        return weight < than_weight
    if loss != than_loss:
        return loss < than_loss
    return finish_ms > than_finish_ms


@compiled
def backoff_s(queue_length: int, per_waiting_s: float, most_s: float) -> float:
    """Rule 8: how long a preempted request of a back-off tier stays out."""
    return min(most_s, per_waiting_s * queue_length)
