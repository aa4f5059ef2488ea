"""Reads from a replay what each interval used; it prices nothing.

The window that is paid for begins with the trace and ends with its last arrival or with the run's
last interval, whichever is later: the tokens and calls that a cost is divided by are the whole
run's, so its drain is paid for too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.step_time import linear_ms
from trimtab.training.economics.costs import Meter

if TYPE_CHECKING:
    from trimtab.engine_bridge.replay.report import ReplayResult


def fixed_step_ms(spec: EngineSpec) -> float:
    """The part of a step that it takes whatever it carries: that of one token, milliseconds."""
    return float(linear_ms(spec.coef, 1.0, 1.0))


def read_meter(result: ReplayResult, *, plan: Plan, spec: EngineSpec, duration_s: float) -> Meter:
    """What a run used.

    Args:
        result: the run.
        plan: that the run was under; says which tiers share a pool.
        spec: the engine, for the fixed part of a step.
        duration_s: of the trace; what the run did not last of it counts as idle.
    """
    pool_of_tier = np.array(plan.pool_of_tier, np.int64)
    first_tier = [plan.pool_of_tier.index(pool) for pool in range(len(plan.pools))]
    fixed_s = fixed_step_ms(spec) * 1e-3
    length: list[float] = []
    worked: list[float] = []
    service: list[list[float]] = []
    held: list[list[float]] = []
    guaranteed: list[list[float]] = []
    shares: list[tuple[float, ...]] = []
    for t in result.telemetry:
        length.append(t.interval_s)
        worked.append(max(0.0, t.busy_fraction * t.interval_s - t.steps * fixed_s))
        service.append([tier.service_ms for tier in t.tiers])
        # Telemetry repeats a pool's blocks in each of its tiers, so one tier speaks for its pool.
        held.append([t.tiers[i].kv_blocks_used for i in first_tier])
        guaranteed.append([t.tiers[i].kv_blocks_guaranteed for i in first_tier])
        shares.append(t.applied.prefill_shares)
    rest_s = duration_s - sum(length)
    if rest_s > 0 or not length:
        length.append(max(0.0, rest_s))
        worked.append(0.0)
        service.append([0.0] * len(plan.tiers))
        held.append([0] * len(plan.pools))
        guaranteed.append([f * spec.num_gpu_blocks for f in plan.pools.values()])
        shares.append(tuple(tier.prefill_share for tier in plan.tiers.values()))
    return Meter(
        length_s=np.array(length, np.float64),
        worked_s=np.array(worked, np.float64),
        service_ms=np.array(service, np.float64),
        held_blocks=np.array(held, np.float64),
        guaranteed_blocks=np.array(guaranteed, np.float64),
        shares=np.array(shares, np.float64),
        pool_of_tier=pool_of_tier,
    )
