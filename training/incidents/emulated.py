"""Serves a script on vLLM's own scheduler and KV-cache manager, in virtual time. It needs vLLM."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.replay.report import DraftCounts
from trimtab.engine_bridge.trace import Trace
from trimtab.engine_bridge.vllm.virtual_record import RecordedVllm
from trimtab.training.incidents.served import INTERVAL_S, FloatArray, Served, Timeline


def serve(trace: Trace, plan: Plan, spec: EngineSpec, rules: RuleSet) -> Served:
    """Run the trace to its end; a `served.Serve`."""
    engine = RecordedVllm(trace, spec, rules, plan)
    times: list[float] = []
    kv: list[FloatArray] = []
    lost: list[FloatArray] = []
    queue: list[FloatArray] = []
    before: FloatArray = np.zeros(len(plan.tiers))
    while engine.left > 0:
        engine.advance(INTERVAL_S * (len(times) + 1))
        so_far = _by_tier(engine, engine.preemptions(), plan)
        times.append(engine.now_s)
        kv.append(_blocks_by_pool(engine, plan) / spec.num_gpu_blocks)
        lost.append(so_far - before)
        queue.append(_count(engine, engine.waiting, plan))
        before = so_far
    return Served(
        requests=engine.requests(),
        timeline=Timeline(
            time_s=np.array(times),
            kv_fraction=np.array(kv),
            preemptions=np.array(lost),
            queue=np.array(queue),
        ),
        end_s=engine.now_s,
        busy_s=engine.busy_s,
        drafts=() if spec.draft is None else _drafts(engine, len(plan.tiers)),
    )


def _by_tier(engine: RecordedVllm, counts: npt.NDArray[np.int64], plan: Plan) -> FloatArray:
    sums = np.bincount(engine.tiers, weights=counts, minlength=len(plan.tiers))
    return np.asarray(sums, np.float64)


def _drafts(engine: RecordedVllm, tiers: int) -> tuple[DraftCounts, ...]:
    tier = np.array(engine.tiers)
    return tuple(
        DraftCounts(
            drafts=int(engine.drafted[tier == t].sum()),
            accepted=int(engine.accepted[tier == t].sum()),
            steps=int(engine.decodes[tier == t].sum()),
        )
        for t in range(tiers)
    )


def _blocks_by_pool(engine: RecordedVllm, plan: Plan) -> FloatArray:
    held = np.zeros(len(plan.pools))
    for row, blocks in engine.held_blocks().items():
        held[plan.pool_of_tier[engine.tiers[row]]] += blocks
    return held


def _count(engine: RecordedVllm, rows: list[int], plan: Plan) -> FloatArray:
    tiers = [engine.tiers[row] for row in rows]
    return np.bincount(tiers, minlength=len(plan.tiers)).astype(np.float64)
