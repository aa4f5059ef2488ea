"""Case 2: at the batch cap a paying request must not wait for a free one to finish.

Reported for vLLM: its waiting loop stops once `max_num_seqs` requests run, whatever their
priorities. The opposite fault is as bad: equals that displace each other in turn.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases.replaying import (
    FINISHED,
    T0,
    T1,
    T2,
    T3,
    TIERS,
    Columns,
    Row,
    Serve,
    engine_spec,
    replay,
    trace_of,
    ttft_s,
)
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.trace import NO_SESSION, Trace

ARRIVES_S = 2.0
STEP_S = 0.009


def run(
    newcomers: list[Row],
    *,
    cap: int = 32,
    tier: int = T3,
    output: int = 2000,
    blocks: int = 26_000,
    rules: RuleSet = "fair",
    serve: Serve = replay,
) -> Columns:
    """`cap` requests of a tier from the start, then the newcomers."""
    rows = [Row(0.0, tier, 512, output)] * cap + newcomers
    spec = engine_spec(max_num_seqs=cap, num_gpu_blocks=blocks)
    return serve(trace_of(rows), spec, rules).requests


def newcomer(tier: int, at_s: float = ARRIVES_S) -> Row:
    return Row(at_s, tier, 256, 32)


@pytest.mark.parametrize("cap", [8, 32, 64])
def test_stock_priority_waits_for_the_first_low_request_to_finish(cap: int) -> None:
    expect_a_wait_for_the_first_to_finish(run([newcomer(T0)], cap=cap, rules="priority"))


def expect_a_wait_for_the_first_to_finish(q: Columns) -> None:
    new = q["tier"] == T0
    assert q["admitted_s"][new] >= np.min(q["last_token_s"][~new])
    # About 2,000 steps of 8 to 12 ms, less the two seconds before it came.
    assert 10.0 < ttft_s(q)[new][0] < 22.0
    assert q["preemptions"].sum() == 0


@pytest.mark.parametrize("tiers", [(T0, T3), (T0, T2), (T0, T1), (T1, T2), (T1, T3), (T2, T3)])
@pytest.mark.parametrize("cap", [1, 8, 32, 64])
def test_a_higher_tier_is_admitted_within_two_steps_for_one_victim(
    cap: int, tiers: tuple[int, int]
) -> None:
    high, low = tiers
    expect_one_victim(run([newcomer(high)], cap=cap, tier=low), high)


def expect_one_victim(q: Columns, high: int) -> None:
    new = q["tier"] == high
    assert (q["outcome"] == FINISHED).all()
    # It arrives during one step and is planned into the next.
    assert q["admitted_s"][new][0] - ARRIVES_S <= 2 * STEP_S
    assert q["preemptions"][new] == 0
    assert q["preemptions"].sum() == 1


def test_the_victim_is_the_one_with_least_to_compute_again() -> None:
    expect_the_cheapest_victim(replay)


def expect_the_cheapest_victim(serve: Serve) -> None:
    rows = [Row(0.1 * k, T3, 512 + 64 * (k % 5), 3000) for k in range(16)]
    rows += [Row(1.95, T2, 64, 3000), Row(3.0, T0, 256, 32)]
    q = serve(trace_of(rows), engine_spec(max_num_seqs=17)).requests
    low = np.flatnonzero(q["tier"] == T3)
    victim = np.flatnonzero(q["preemptions"])
    decoded = (3.0 - q["first_token_s"][low]) / STEP_S
    assert victim.tolist() == [low[np.argmin(q["prompt_tokens"][low] + decoded)]]
    assert q["outcome"][victim] == FINISHED


@pytest.mark.parametrize(
    ("tier", "others"), [(tier, others) for tier in range(4) for others in range(tier + 1)]
)
def test_nobody_gives_way_to_an_equal_or_a_lower_tier(tier: int, others: int) -> None:
    q = run([newcomer(tier, ARRIVES_S + 0.1 * k) for k in range(8)], tier=others)
    assert q["preemptions"].sum() == 0


def test_no_victim_is_taken_in_vain() -> None:
    expect_no_victim_in_vain(replay)


def expect_no_victim_in_vain(serve: Serve) -> None:
    # What runs is T3's guaranteed part and paying requests: there are no blocks for the newcomer.
    rows = [Row(0.0, T0, 3200, 2000)] * 3 + [Row(0.0, T3, 512, 800)]
    rows.append(Row(ARRIVES_S, T0, 6400, 32))
    q = serve(trace_of(rows), engine_spec(max_num_seqs=4, num_gpu_blocks=1000)).requests
    new = q["prompt_tokens"] == 6400
    assert q["admitted_s"][new] > ARRIVES_S + 1.0
    assert q["preemptions"].sum() == 0


@pytest.mark.parametrize(
    ("every_s", "count"), [(0.5, 40), (0.3, 64), (0.02, 200)], ids=["few", "some", "many"]
)
@pytest.mark.parametrize("cap", [16, 32, 128])
def test_a_stream_of_newcomers_displaces_nobody_again_and_again(
    cap: int, every_s: float, count: int
) -> None:
    q = run([newcomer(T0, ARRIVES_S + every_s * k) for k in range(count)], cap=cap)
    expect_few_displaced(q, every_s)


def expect_few_displaced(q: Columns, every_s: float) -> None:
    new = q["tier"] == T0
    assert (q["outcome"] == FINISHED).all()
    assert ttft_s(q)[new].max() < 0.1
    # Many at once need many places; then a place or two more is kept than is needed.
    at_once = 1 + int(0.35 / every_s)
    assert q["preemptions"].sum() <= 2 + 6 * at_once
    assert q["preemptions"].max() <= (2 if every_s > 0.1 else 4)


@pytest.mark.parametrize("cap", [1, 4])
def test_a_small_batch_never_makes_a_paying_request_wait(cap: int) -> None:
    q = run([newcomer(T0, ARRIVES_S + 0.3 * k) for k in range(64)], cap=cap)
    assert ttft_s(q)[q["tier"] == T0].max() < 0.1
    assert (q["outcome"] == FINISHED).all()


def test_the_lowest_tier_is_served_beside_a_batch_full_of_paying_requests() -> None:
    # T0 alone could fill every place for good; T3's turn comes by its weight, here 1 of 4.
    plan = load_plan()
    tiers = {
        name: tier.model_copy(update={"weight": 3.0 if name == "T0" else 1.0})
        for name, tier in plan.tiers.items()
    }
    rows = [Row(0.01 * k, T0, 256, 200) for k in range(6000)]
    rows += [Row(1.0 + 0.5 * k, T3, 256, 200) for k in range(40)]
    trace = trace_of(rows)
    never = tiers["T3"].shed.model_copy(update={"mode": "never"})
    tiers["T3"] = tiers["T3"].model_copy(update={"shed": never})
    engine = ReplayEngine(
        trace, plan.model_copy(update={"tiers": tiers}), engine_spec(max_num_seqs=8)
    )
    while engine.now_s < 60.0:
        engine.advance(1.0)
    q = engine.result().requests
    assert np.sum((q["tier"] == T3) & (q["outcome"] == FINISHED)) >= 15


def test_a_displaced_turn_keeps_its_session_going() -> None:
    rows = 33
    trace = Trace.build(
        arrival_s=np.r_[np.zeros(32), ARRIVES_S],
        tier=np.r_[np.full(32, T3), T0],
        prompt_tokens=np.full(rows, 512),
        output_tokens=np.r_[np.full(32, 400), 32],
        session=np.r_[np.repeat(np.arange(16), 2), NO_SESSION].astype(np.int32),
        turn=np.r_[np.tile([0, 1], 16), 0].astype(np.int32),
        think_s=np.zeros(rows),
        tier_names=TIERS,
    )
    q = replay(trace, engine_spec(max_num_seqs=16)).requests
    assert (q["outcome"] == FINISHED).all()
    assert q["preemptions"].sum() == 1
