"""Serves a script on the replay."""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.trace import Trace
from trimtab.training.incidents.served import INTERVAL_S, Served, Timeline


def serve(trace: Trace, plan: Plan, spec: EngineSpec, rules: RuleSet) -> Served:
    """Run the trace to its end; a `served.Serve`."""
    engine = ReplayEngine(trace, plan, spec, rules=rules)
    engine.run(interval_s=INTERVAL_S)
    result = engine.result()
    telemetry = result.telemetry
    # Telemetry repeats a pool's blocks in each of its tiers, so one tier speaks for its pool.
    speaker = [plan.pool_of_tier.index(pool) for pool in range(len(plan.pools))]
    used = [[t.tiers[i].kv_blocks_used for i in speaker] for t in telemetry]
    return Served(
        requests=result.requests,
        timeline=Timeline(
            time_s=np.array([t.time_s for t in telemetry]),
            kv_fraction=np.array(used, np.float64) / spec.num_gpu_blocks,
            preemptions=np.array([[x.preemptions for x in t.tiers] for t in telemetry], np.float64),
            queue=np.array([[x.queue_length for x in t.tiers] for t in telemetry], np.float64),
        ),
        end_s=result.end_s,
        busy_s=result.engine_busy_s,
        drafts=result.drafts,
        telemetry=telemetry,
    )
