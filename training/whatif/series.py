"""What a run looked like over time, thinned out for plots.

At most `POINTS` points a series: neighbouring control intervals are averaged. It judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.capacity import request_cost_ms
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.pricing import repeated_prompt_tokens
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace

FloatArray = npt.NDArray[np.float64]

POINTS = 360
LOAD_BINS = 120
ATTAINMENT_BINS = 60


@dataclass(frozen=True, kw_only=True)
class Series:
    """One run over time. Shapes: (points,), (points, tiers) or (points, pools)."""

    time_s: FloatArray
    """Middle of each point's stretch, seconds from the start."""
    queue: FloatArray
    """Waiting requests by tier."""
    kv_fraction: FloatArray
    """Part of all KV blocks that running requests of each pool hold."""
    kv_guaranteed: FloatArray
    """Part of all KV blocks that each pool is guaranteed."""
    weights: FloatArray
    """Weights by tier, over the plan's static ones."""
    kv_moves: FloatArray
    """KV fractions by pool, over the plan's static ones."""
    budget: FloatArray
    """Prefill budget over the plan's static one, shape (points,)."""
    attainment: FloatArray
    """Share within targets by arrival, shape (ATTAINMENT_BINS, tiers); NaN without requests."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Engine time asked for over wall time, by arrival."""

    time_s: FloatArray
    """Middle of each bin, shape (LOAD_BINS,)."""
    by_tier: FloatArray
    """Share of the engine's capacity, shape (LOAD_BINS, tiers)."""


def offered(
    trace: Trace, tier_of: npt.NDArray[np.int64], tiers: int, spec: EngineSpec, *, mean_load: float
) -> Load:
    """What the traffic asks of the engine over time.

    Args:
        trace: the traffic.
        tier_of: each request's tier in the plan, shape (n,).
        tiers: how many the plan has.
        spec: the engine.
        mean_load: what the whole trace asks for (`offered_load`); the bins are scaled to it, since
            how much of a prompt a cache still holds is known on average only.
    """
    cached = repeated_prompt_tokens(trace) if spec.enable_prefix_caching else 0
    cost_ms = request_cost_ms(
        spec,
        np.maximum(1, trace.prompt_tokens - cached),
        trace.prompt_tokens,
        trace.output_tokens,
    )
    width_s = max(trace.duration_s, 1e-9) / LOAD_BINS
    place = np.clip((trace.arrival_s / width_s).astype(np.int64), 0, LOAD_BINS - 1)
    flat = np.bincount(place * tiers + tier_of, weights=cost_ms, minlength=LOAD_BINS * tiers)
    by_tier = flat.reshape(LOAD_BINS, tiers)
    known = np.isfinite(mean_load) and by_tier.sum() > 0
    scale = mean_load * LOAD_BINS / by_tier.sum() if known else 1.0 / (width_s * 1e3)
    return Load(
        time_s=np.asarray((np.arange(LOAD_BINS) + 0.5) * width_s, np.float64),
        by_tier=by_tier * scale,
    )


def over_time(
    telemetry: Sequence[Telemetry], *, plan: Plan, total_blocks: int, attainment: FloatArray
) -> Series:
    """The series of one run."""
    first_tier = [plan.pool_of_tier.index(pool) for pool in range(len(plan.pools))]
    end_s = np.array([t.time_s for t in telemetry])
    length_s = np.array([t.interval_s for t in telemetry])
    # Telemetry repeats a pool's blocks in each of its tiers, so one tier speaks for its pool.
    used = [[t.tiers[i].kv_blocks_used for i in first_tier] for t in telemetry]
    guaranteed = [[t.tiers[i].kv_blocks_guaranteed for i in first_tier] for t in telemetry]
    return Series(
        time_s=thin(end_s - length_s / 2),
        queue=thin(np.array([[x.queue_length for x in t.tiers] for t in telemetry])),
        kv_fraction=thin(np.array(used, np.float64) / total_blocks),
        kv_guaranteed=thin(np.array(guaranteed, np.float64) / total_blocks),
        weights=thin(
            np.array([t.applied.weights for t in telemetry])
            / np.array([tier.weight for tier in plan.tiers.values()])
        ),
        kv_moves=thin(
            np.array([t.applied.kv_fractions for t in telemetry])
            / np.array(list(plan.pools.values()))
        ),
        budget=thin(
            np.array([t.applied.prefill_budget_tokens for t in telemetry])
            / plan.prefill.budget_tokens
        ),
        attainment=attainment,
    )


def attainment_over_time(
    arrival_s: FloatArray,
    tier_of: npt.NDArray[np.int64],
    met: npt.NDArray[np.bool_],
    *,
    tiers: int,
    duration_s: float,
) -> FloatArray:
    """Share of each bin's arrivals that were served within targets, (ATTAINMENT_BINS, tiers)."""
    width_s = max(duration_s, 1e-9) / ATTAINMENT_BINS
    place = np.clip((arrival_s / width_s).astype(np.int64), 0, ATTAINMENT_BINS - 1)
    cell = place * tiers + tier_of
    every = np.bincount(cell, minlength=ATTAINMENT_BINS * tiers)
    within = np.bincount(cell, weights=met, minlength=ATTAINMENT_BINS * tiers)
    share = np.where(every > 0, within / np.maximum(every, 1), np.nan)
    return share.reshape(ATTAINMENT_BINS, tiers)


def thin(values: npt.ArrayLike) -> FloatArray:
    """At most POINTS rows: means of equally many neighbouring rows (the last may be fewer)."""
    rows = np.asarray(values, np.float64)
    size = -(-len(rows) // POINTS)
    if size <= 1:
        return rows
    starts = np.arange(0, len(rows), size)
    counts = np.diff(np.append(starts, len(rows)))
    sums = np.add.reduceat(rows, starts, axis=0)
    return np.asarray(sums / counts.reshape(-1, *[1] * (rows.ndim - 1)))
