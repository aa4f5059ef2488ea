"""Case 10: limits that change on a live engine.

A lower cap drains, a cap above the start-up capacity is refused, a smaller pool converges as blocks
come back, nonsense changes nothing, and an engine that hears nothing returns to its static plan.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest

from tests.cases.replaying import FINISHED, T0, T2, T3, Row, engine_spec, one_step, trace_of
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import AllocationError
from trimtab.engine_bridge.limits import LimitReason, project
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine

CAPACITY = 64
FOREVER = math.inf
PLAN = with_values(load_plan(), {"tiers.T2.shed.mode": "never"})
"""The shipped plan; nobody is given up, so that every request's fate is the limits' doing."""


def engine_under_load(capacity: int = CAPACITY, tier: int = T2) -> ReplayEngine:
    """More requests than places, all of one tier; `capacity` of them run after a second."""
    rng = np.random.default_rng(10)
    rows = [Row(0.0, tier, 256, int(n)) for n in rng.integers(400, 1200, 4 * capacity)]
    engine = ReplayEngine(trace_of(rows), PLAN, engine_spec(max_num_seqs=capacity))
    while sum(t.running for t in engine.advance(0.05).tiers) < capacity:
        assert engine.now_s < 30.0
    return engine


def set_cap(engine: ReplayEngine, cap: int) -> Allocation:
    now = engine.allocation
    return engine.apply(
        dataclasses.replace(now, max_num_seqs=cap, version=now.version + 1), ttl_s=FOREVER
    )


def running(engine: ReplayEngine, interval_s: float = 0.05) -> int:
    return sum(t.running for t in engine.advance(interval_s).tiers)


def running_after_a_step(engine: ReplayEngine) -> int:
    return sum(t.running for t in one_step(engine).tiers)


@pytest.mark.parametrize("cap", [1, 16, 40])
def test_a_lower_cap_drains_and_admits_again_exactly_below_it(cap: int) -> None:
    engine = engine_under_load()
    assert set_cap(engine, cap).max_num_seqs == cap
    counts, admitted = [CAPACITY], engine._state.engine[0].admissions
    while counts[-1] > cap:
        counts.append(running_after_a_step(engine))
        assert engine._state.engine[0].admissions == admitted
    assert np.all(np.diff(counts) <= 0)
    while counts[-1] == cap:
        counts.append(running_after_a_step(engine))
        assert engine._state.engine[0].admissions == admitted
    assert running_after_a_step(engine) <= cap
    assert engine._state.engine[0].admissions > admitted
    for _ in range(40):
        assert running(engine) <= cap
    set_cap(engine, CAPACITY)
    assert running(engine, 2.0) == CAPACITY
    while not engine.finished:
        engine.advance(5.0)
    q = engine.result().requests
    assert (q["outcome"] == FINISHED).all()
    assert q["preemptions"].sum() == 0


def test_a_paying_request_does_not_displace_anybody_while_a_lower_cap_drains() -> None:
    rows = [Row(0.0, T3, 256, 600)] * 64 + [Row(2.0, T0, 256, 32)]
    engine = ReplayEngine(trace_of(rows), load_plan(), engine_spec(max_num_seqs=64))
    engine.advance(1.9)
    set_cap(engine, 16)
    while not engine.finished:
        engine.advance(1.0)
    q = engine.result().requests
    assert q["preemptions"].sum() == 0
    assert (q["outcome"] == FINISHED).all()


@pytest.mark.parametrize("asked", [65, 128, 4096, 10**9])
def test_a_cap_above_the_capacity_is_refused_and_the_old_one_kept(asked: int) -> None:
    engine = engine_under_load()
    set_cap(engine, 16)
    before = engine.allocation
    got = set_cap(engine, asked)
    assert got.max_num_seqs == before.max_num_seqs == 16
    assert got.version == before.version + 1
    projection = project(
        dataclasses.replace(before, max_num_seqs=asked),
        before,
        PLAN,
        capacity_max_num_seqs=CAPACITY,
    )
    assert [limited.reason for limited in projection.limited] == [LimitReason.CAPACITY]


def shrink(target: float) -> tuple[ReplayEngine, list[int], list[int]]:
    """The paid pool holds 65 % of the blocks; its guarantee goes down to `target` of them."""
    plan = with_values(
        load_plan(), {"tiers.T0.targets.ttft_ms": 60_000.0, "controller.lease_intervals": 100}
    )
    rows = [Row(0.01 * k, T0, 2000, 900) for k in range(60)]
    rows += [Row(3.0 + 0.5 * k, T3, 1000, 300) for k in range(60)]
    engine = ReplayEngine(trace_of(rows), plan, engine_spec(num_gpu_blocks=60 * 172 * 100 // 65))
    most = 0.62 * engine._state.engine[0].total_blocks
    while engine.advance(0.25).tiers[T0].kv_blocks_used < most:
        assert engine.now_s < 30.0
    held, guaranteed = [], []
    others = (1.0 - target) * np.array([0.6, 0.4])
    for version in range(1, 60):
        engine.apply(
            dataclasses.replace(
                engine.allocation, kv_fractions=(target, *others.tolist()), version=version
            )
        )
        telemetry = engine.advance(2.0)
        held.append(telemetry.tiers[T0].kv_blocks_used)
        guaranteed.append(telemetry.tiers[T0].kv_blocks_guaranteed)
        pools = engine._state.pools
        assert pools.guaranteed.sum() == engine._state.engine[0].total_blocks
        assert pools.held.sum() <= engine._state.engine[0].total_blocks
        if engine.finished:
            break
    return engine, held, guaranteed


@pytest.mark.parametrize("target", [0.5, 0.3])
def test_a_smaller_pool_takes_no_block_from_a_running_paid_request(target: float) -> None:
    engine, held, guaranteed = shrink(target)
    total = engine._state.engine[0].total_blocks
    assert guaranteed[0] >= int(0.64 * total)
    assert abs(min(guaranteed) - target * total) <= 1
    assert held[-1] == 0 or held[-1] <= guaranteed[-1]
    while not engine.finished:
        engine.advance(10.0)
    q = engine.result().requests
    assert (q["outcome"] != 0).all()
    assert q["preemptions"][q["tier"] == T0].sum() == 0
    assert (q["outcome"][q["tier"] == T0] == FINISHED).all()


NONSENSE: dict[str, dict[str, Any]] = {
    "weights": {"weights": (math.nan, math.inf, -1.0, 1e300)},
    "fractions": {"kv_fractions": (math.nan, 0.5, 0.5)},
    "negative fractions": {"kv_fractions": (-5.0, 3.0, 3.0)},
    "budget": {"prefill_budget_tokens": -7},
    "huge budget": {"prefill_budget_tokens": 10**12},
    "shares": {"prefill_shares": (math.inf, 0.0, 0.0, 0.0)},
    "slack": {"slack_fraction": math.nan, "low_tier_chunk_share": -math.inf},
    "cap": {"max_num_seqs": 0},
    "words": {"max_num_seqs": "many"},
}


@pytest.mark.parametrize("changes", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_held_to_the_bounds_and_loses_nobody(changes: dict[str, Any]) -> None:
    engine = engine_under_load()
    before = engine.allocation
    got = engine.apply(dataclasses.replace(before, version=7, **changes), ttl_s=FOREVER)
    assert project(got, got, PLAN, capacity_max_num_seqs=CAPACITY).allocation == got
    assert got == engine.allocation
    assert got.version == 7
    for field in dataclasses.fields(before):
        if field.name not in changes and field.name != "version":
            assert getattr(got, field.name) == getattr(before, field.name)
    while not engine.finished:
        engine.advance(5.0)
    assert (engine.result().requests["outcome"] == FINISHED).all()


def test_an_allocation_of_another_shape_is_refused_and_changes_nothing() -> None:
    engine = engine_under_load()
    before = engine.allocation
    with pytest.raises(AllocationError, match="weights"):
        engine.apply(dataclasses.replace(before, weights=(1.0,)))
    assert engine.allocation is before


def test_silence_brings_the_static_plan_back_within_the_lease() -> None:
    engine = engine_under_load()
    static = Allocation.static(PLAN)
    lease_s = PLAN.controller.interval_s * PLAN.controller.lease_intervals
    now = engine.allocation
    applied = engine.apply(
        dataclasses.replace(now, prefill_budget_tokens=2000, max_num_seqs=16, version=3)
    )
    assert applied != static
    started_s, back_s, full_s = engine.now_s, math.nan, math.nan
    while engine.now_s < started_s + 30.0:
        telemetry = engine.advance(1.0)
        if telemetry.applied == static and math.isnan(back_s):
            back_s = telemetry.time_s - started_s
        if telemetry.tiers[T2].running == CAPACITY and not math.isnan(back_s):
            full_s = np.fmin(full_s, telemetry.time_s - started_s)
    assert lease_s - 1.1 <= back_s <= lease_s + 1.1
    assert engine.allocation == static
    assert full_s <= back_s + 2.0


def test_a_renewed_lease_holds() -> None:
    engine = engine_under_load()
    for version in range(1, 16):
        engine.apply(dataclasses.replace(engine.allocation, max_num_seqs=16, version=version))
        engine.advance(2.0)
        assert engine.allocation.max_num_seqs == 16


def test_every_change_is_one_version_that_telemetry_shows() -> None:
    engine, seen = engine_under_load(), []
    for version in range(1, 6):
        now = engine.allocation
        engine.apply(
            dataclasses.replace(
                now,
                weights=tuple(w * 1.5 for w in now.weights),
                prefill_budget_tokens=int(now.prefill_budget_tokens * 0.8),
                max_num_seqs=CAPACITY - version,
                version=version,
            )
        )
        seen.append(engine.advance(1.0).applied)
    assert [a.version for a in seen] == [1, 2, 3, 4, 5]
    assert [a.max_num_seqs for a in seen] == [63, 62, 61, 60, 59]
    for before, after in itertools.pairwise(seen):
        assert after.weights != before.weights
        assert after.prefill_budget_tokens < before.prefill_budget_tokens
