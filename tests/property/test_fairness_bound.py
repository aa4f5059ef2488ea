"""Rule 3: no workload drives two backlogged flows further apart than docs/fairness.md allows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_bridge.replay.workloads import (
    TIERS,
    aging_plan,
    encoding_engine,
    random_trace,
    small_engine,
    with_media,
)
from tests.property.fair_server import (
    Chances,
    Windows,
    build_level,
    constant_ms,
    dispatch,
    enqueue,
    pick,
    random_case,
    run,
)
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.replay.report import pair_bounds_ms
from trimtab.engine_bridge.rules import fair_queue
from trimtab.engine_bridge.trace import Trace

_CASES = 30
_SLACK = 1.0 + 1e-9

chances = st.builds(
    Chances,
    batch=st.sampled_from((1, 2, 5, 24)),
    error=st.sampled_from((1.0, 3.0, 30.0)),
    tail=st.sampled_from((0.8, 2.0, 8.0)),
    weights=st.sampled_from((0.0, 0.01, 0.3)),
    toggle=st.sampled_from((0.0, 0.02, 0.2)),
    hold=st.sampled_from((0.0, 0.02, 0.2)),
    cancel=st.sampled_from((0.0, 0.05, 0.4)),
    demote=st.sampled_from((0.0, 0.05, 0.2)),
    reestimate=st.sampled_from((0.0, 0.3)),
    outlive=st.sampled_from((0.0, 1.0)),
    feasible=st.sampled_from((0, 1)),
    passes=st.sampled_from((0.0, 0.0, 0.3, 1.0)),
)


def with_rules(plan: Plan, **switches: bool) -> Plan:
    """The plan with some rules switched."""
    return plan.model_copy(update={"rules": plan.rules.model_copy(update=switches)})


def backlog(requests: int) -> Trace:
    """Equal requests of T0 and T3 in turn, all there from the start."""
    return Trace.build(
        arrival_s=np.zeros(requests),
        tier=np.arange(requests) % 2 * 3,
        tenant=np.zeros(requests, int),
        prompt_tokens=np.full(requests, 300),
        output_tokens=np.full(requests, 100),
        tier_names=TIERS,
        tenant_names=("a",),
    )


window = st.sampled_from((0.0, 3.0, 100.0))
windows = st.builds(
    Windows,
    feasible_ms=window,
    tiers_ms=window,
    tenants_ms=window,
    prefill_factor=st.sampled_from((np.inf, 0.0, 5.0)),
)


@given(seed=st.integers(0, 2**32), how=chances, windows=windows)
@settings(max_examples=100, deadline=None)
def test_no_two_backlogged_flows_drift_further_apart_than_the_bound(
    seed: int, how: Chances, windows: Windows
) -> None:
    rng = np.random.default_rng(seed)
    for number in range(_CASES):
        case = random_case(rng, requests=500, windows=windows)
        run(rng, case.level, case.tiers, case.tenants, how)
        constant = constant_ms(case.tiers, windows.tiers_ms, passing=how.passes > 0.0)
        measured = pair_bounds_ms(case.level.tiers, aging_ms=windows.tiers_ms)
        upper = np.tri(len(constant), k=-1, dtype=bool)
        assert np.all(case.tiers.gap[upper] <= measured[upper] * _SLACK), f"tiers, case {number}"
        assert np.all(measured[upper] <= constant[upper] * _SLACK), f"constant, case {number}"
        feasible_ms = windows.feasible_ms if how.feasible else None
        between = constant_ms(case.tenants, windows.tenants_ms, feasible_ms)
        assert np.all(case.tenants.gap <= between * _SLACK), f"tenants, case {number}"


def test_ageing_takes_all_that_the_bound_gives_it_and_no_more() -> None:
    """First one tier is a window ahead, then the other: the bound needs both of its windows."""
    window_ms, count = 100.0, 400
    level = build_level([1.0, 1.0], [[1.0], [1.0]], 2 * count, Windows(tiers_ms=window_ms))
    level.engine.lead_per_s[:] = 1.0
    level.req.estimate_ms[:] = 1.0
    # The first tier's requests are old at 10 s, new at 20 s; the second's are just the other way.
    level.req.arrived_s[:125], level.req.arrived_s[125:count] = 0.0, 20.0
    level.req.arrived_s[count:] = 10.0
    for row in range(2 * count):
        tier = level.req[row].tenant = level.req[row].tier = row // count
        enqueue(level, row, tier)
    served, ahead = np.zeros(2), []
    for now_s, starts in ((10.0, 150), (20.0, 250)):
        level.engine.now_s[:] = now_s
        for _ in range(starts):
            row = pick(level, 0, np.zeros(2, np.int32))
            dispatch(level, row)
            fair_queue.use(level.tiers, level.tenants, level.req, row, row // count, 1.0, 1)
            served[row // count] += 1.0
            ahead.append(served[0] - served[1])
    gap = max(ahead) - min(ahead)
    assert gap >= 2.0 * window_ms
    assert pair_bounds_ms(level.tiers).max() < gap
    assert gap <= pair_bounds_ms(level.tiers, aging_ms=window_ms).max()


@given(
    seed=st.integers(0, 10_000),
    seqs=st.integers(1, 16),
    blocks=st.integers(200, 900),
    cap=st.booleans(),
    change=st.booleans(),
    aging_ms=st.sampled_from((0.0, 5.0, 1000.0)),
    item_ms=st.sampled_from((None, 1.0, 300.0)),
    chunks=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_the_replay_s_measured_gap_stays_under_its_bound(
    seed: int,
    seqs: int,
    blocks: int,
    cap: bool,
    change: bool,
    aging_ms: float,
    item_ms: float | None,
    chunks: bool,
) -> None:
    plan = with_values(
        aging_plan(),
        {
            "rules.cap_preemption": cap,
            "aging.tier_window_ms": aging_ms,
            "feasible.chunks": chunks,
        },
    )
    spec = small_engine(blocks=blocks, seqs=seqs)
    trace = random_trace(seed, requests=100, rate=200.0)
    if item_ms is not None:
        trace, spec = with_media(trace, seed), encoding_engine(spec, item_ms=item_ms)
    engine = ReplayEngine(trace, plan, spec)
    rng = np.random.default_rng(seed)
    while not engine.finished:
        if change:
            weights = tuple(w * rng.uniform(0.5, 2.0) for w in engine.allocation.weights)
            engine.apply(dataclasses.replace(engine.allocation, weights=weights))
        engine.advance(float(rng.uniform(0.02, 0.3)))
    result = engine.result()
    assert result.service_gap_ms <= result.service_gap_bound_ms * _SLACK


@pytest.mark.parametrize("cap", [False, True])
def test_two_backlogged_tiers_of_the_replay_share_by_weight(cap: bool) -> None:
    plan = with_rules(load_plan(None), cap_preemption=cap, late_shedding=False)
    tiers = dict(plan.tiers)
    for name, weight in (("T0", 2.0), ("T3", 1.0)):
        tiers[name] = tiers[name].model_copy(update={"weight": weight})
    engine = ReplayEngine(
        backlog(800), plan.model_copy(update={"tiers": tiers}), small_engine(blocks=3000, seqs=8)
    )
    served = np.zeros(4)
    for _ in range(15):
        served += [tier.service_ms for tier in engine.advance(1.0).tiers]
    result = engine.result()
    assert 1.8 <= served[0] / served[3] <= 2.4
    assert result.service_gap_ms <= result.service_gap_bound_ms * _SLACK


def test_a_tier_held_back_for_long_banks_no_credit() -> None:
    """Its share counts from when it may run again, not from when it was stopped."""
    plan = with_rules(
        load_plan(None),
        late_shedding=False,
        cap_preemption=False,
        prefill_shares=False,
        slack_chunk=False,
    )
    tiers = {name: tier.model_copy(update={"weight": 1.0}) for name, tier in plan.tiers.items()}
    plan = plan.model_copy(update={"tiers": tiers})
    engine = ReplayEngine(backlog(1200), plan, small_engine(blocks=3000, seqs=8))
    free = engine.allocation
    held = dataclasses.replace(free, max_running=(*free.max_running[:3], 1))
    engine.apply(held, ttl_s=math.inf)
    for _ in range(10):
        engine.advance(1.0)
    engine.apply(free, ttl_s=math.inf)
    engine.advance(1.0)
    served = np.zeros(4)
    for _ in range(5):
        served += [tier.service_ms for tier in engine.advance(1.0).tiers]
    assert 0.75 <= served[0] / served[3] <= 1.33
