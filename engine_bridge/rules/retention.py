"""Rule 7: which cached blocks are reused first.

Each retention class keeps its idle blocks in the order in which they fell idle; the rule compares
only the oldest of each class.
"""

from __future__ import annotations

from typing import Final

from trimtab.engine_bridge.compiled import inlined

SCALED_AGE: Final = 0
LRU: Final = 1
TIER_ORDER: Final = 2
FIXED_QUOTA: Final = 3

_TICK_S = 1e-6


@inlined
def reuse_rate(woken: float, lost: float, prior: float) -> float:
    """Share of a class's cached blocks that come back, from 1 before any is known.

    Multiplied to the class's factor it drops what the traffic never comes back for, whatever its
    tier.

    Args:
        woken: Blocks that were asked for again, evicted meanwhile or not.
        lost: Blocks that were evicted and not asked for since.
        prior: Blocks of good faith, so that a new class is not judged by its first few.
    """
    return (woken + prior) / (woken + lost + prior)


@inlined
def faded(woken: float, lost: float, remembered: float) -> float:
    """Factor of what is known of a class's reuse: beyond `remembered` blocks it counts half."""
    return 0.5 if woken + lost > remembered else 1.0


@inlined
def scaled_age(now_s: float, idle_since_s: float, factor: float) -> float:
    """Idle age over the class's retention factor, seconds; the largest goes first.

    A tick is added so that blocks which fell idle this instant still differ by their factor.
    """
    return (now_s - idle_since_s + _TICK_S) / factor


@inlined
def goes_before(
    eviction: int,
    age: float,
    sequence: int,
    rank: int,
    over_quota: float,
    than_age: float,
    than_sequence: int,
    than_rank: int,
    than_over_quota: float,
) -> bool:
    """Whether one class's oldest blocks are reused before another's.

    Args:
        eviction: SCALED_AGE, LRU, TIER_ORDER (lowest rank first) or FIXED_QUOTA (the class whose
            pool's cached and held blocks exceed its quota most, LRU if none does).
        age: scaled age of the oldest item.
        sequence: when it fell idle; smaller is earlier.
        rank: place of its tier in the strict order.
        over_quota: its pool's blocks beyond its quota, at least 0.
        than_age: the other class's.
        than_sequence: the other class's.
        than_rank: the other class's.
        than_over_quota: the other class's.
    """
    if eviction == SCALED_AGE and age != than_age:
        return age > than_age
    if eviction == TIER_ORDER and rank != than_rank:
        return rank < than_rank
    if eviction == FIXED_QUOTA and over_quota != than_over_quota:
        return over_quota > than_over_quota
    return sequence < than_sequence
