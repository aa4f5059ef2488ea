"""Splits what an engine cost over its tiers: worked time by service, the rest by KV space.

A pure function of what was metered (`meter`); it knows no prices but one, and no replay.

Two things are sold. **Worked time** is what the steps took beyond the time that any step takes; it
is paid by service. The **spare time** (nothing ran, or the fixed part of a step, which one token
pays for as well as a thousand) is the price of having the engine there; it is paid by space, every
KV block alike. A held block is paid by the pool whose requests hold it, so who borrows pays; a
guaranteed block that lies idle and is not lent is paid by the pool that it is kept for. Why so:
docs/economics.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Meter:
    """What one run used, interval by interval."""

    length_s: FloatArray
    """Length of each interval, shape (n,)."""
    worked_s: FloatArray
    """Step time beyond the fixed part of the steps, shape (n,); at most the length."""
    service_ms: FloatArray
    """Engine time spent on each tier, shape (n, tiers)."""
    held_blocks: FloatArray
    """KV blocks that running requests of each pool hold, shape (n, pools)."""
    guaranteed_blocks: FloatArray
    """KV blocks that each pool is guaranteed, shape (n, pools)."""
    shares: FloatArray
    """Each tier's share of the prefill budget, shape (n, tiers)."""
    pool_of_tier: IntArray
    """Index of each tier's pool, shape (tiers,); every pool has a tier."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """What each tier pays, USD, shape (tiers,) each; together the engine's cost."""

    compute_usd: FloatArray
    """Worked time, by service."""
    kv_held_usd: FloatArray
    """Spare time, for the blocks that its requests held."""
    idle_reserve_usd: FloatArray
    """Spare time, for the blocks that were kept for it and lay idle."""

    @property
    def total_usd(self) -> FloatArray:
        """All of it by tier."""
        return self.compute_usd + self.kv_held_usd + self.idle_reserve_usd


def split_cost(meter: Meter, usd_per_s: float) -> Split:
    """Split the engine's cost, price times the intervals' length, over the tiers.

    The worked time of an interval that booked no service counts as spare. Inside a pool, held
    blocks are told apart by the tiers' service in the interval, idle ones by the tiers' shares of
    the prefill budget: the only parts of a whole that the plan promises to a tier by name.
    """
    service = meter.service_ms.sum(axis=1)
    worked_s = np.where(service > 0, np.clip(meter.worked_s, 0.0, meter.length_s), 0.0)
    spare_s = meter.length_s - worked_s
    by_service = _parts(meter.service_ms, service[:, None])
    declared = _inside_pools(meter, meter.shares, _evenly(meter))
    in_use = _inside_pools(meter, meter.service_ms, declared)
    held, idle = _space(meter, declared)
    pool = meter.pool_of_tier
    return Split(
        compute_usd=usd_per_s * (worked_s @ by_service),
        kv_held_usd=usd_per_s * (spare_s @ (held[:, pool] * in_use)),
        idle_reserve_usd=usd_per_s * (spare_s @ (idle[:, pool] * declared)),
    )


def _space(meter: Meter, declared: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Parts of the space that each pool holds, and that lie idle for it; they sum to 1 together.

    What pools hold beyond their guarantee is lent by the idle guarantees, each in proportion.
    """
    held, guaranteed = meter.held_blocks, meter.guaranteed_blocks
    idle = np.maximum(guaranteed - held, 0.0)
    lent = np.maximum(held - guaranteed, 0.0).sum(axis=1)
    unused = idle.sum(axis=1)
    idle = idle * np.clip(1.0 - _parts(lent, unused), 0.0, 1.0)[:, None]
    space = (held + idle).sum(axis=1)[:, None]
    # Without a block, nobody has space: the pools then count alike.
    nothing = np.where(space > 0, 0.0, 1.0 / held.shape[1])
    return _parts(held, space), _parts(idle, space) + nothing


def _inside_pools(meter: Meter, weights: FloatArray, otherwise: FloatArray) -> FloatArray:
    """Each tier's part of its pool by weight, shape (n, tiers); `otherwise` where a pool has none.

    The parts of a pool's tiers sum to 1.
    """
    pools = meter.held_blocks.shape[1]
    member = (meter.pool_of_tier[:, None] == np.arange(pools)).astype(np.float64)
    together = (weights @ member)[:, meter.pool_of_tier]
    return np.where(together > 0, _parts(weights, together), otherwise)


def _evenly(meter: Meter) -> FloatArray:
    members = np.bincount(meter.pool_of_tier)[meter.pool_of_tier]
    return np.broadcast_to(1.0 / members, meter.shares.shape)


def _parts(top: FloatArray, bottom: FloatArray) -> FloatArray:
    """The quotient; 0 where the bottom is."""
    return np.where(bottom > 0, top / np.where(bottom > 0, bottom, 1.0), 0.0)
