"""The account of real replays: it adds up whatever ran, and says what it should."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.plan.load import with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import Trace
from trimtab.training.economics.costs import split_cost
from trimtab.training.economics.meter import read_meter
from trimtab.training.economics.statement import Economics
from trimtab.training.whatif import metrics
from trimtab.training.whatif.run import drive

PLAN = load_plan()
SPEC = get_engine_spec("h100:llama-3.1-8b-tp1").with_limits(num_gpu_blocks=600)
ADDITIVE = ("cost_usd", "compute_usd", "kv_held_usd", "idle_reserve_usd", "calls", "tokens",
            "output_tokens", "good_tokens")  # fmt: skip


def traffic(seed: int, *, requests: int, tiers: tuple[int, ...], span_s: float) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace.build(
        arrival_s=np.sort(rng.uniform(0, span_s, requests)),
        prompt_tokens=rng.integers(1, 4000, requests),
        output_tokens=rng.integers(1, 300, requests),
        tier=rng.choice(tiers, requests),
        tenant=rng.integers(0, 3, requests),
        tier_names=("T0", "T1", "T2", "T3"),
        tenant_names=("a", "b", "c"),
    )


def account(
    trace: Trace, plan: Plan = PLAN, *, policy: str = "static", drain_s: float = 600.0
) -> Economics:
    result = drive(trace, make_policy(policy), plan, SPEC, seed=0, drain_s=drain_s)
    by = metrics.yardstick(trace, plan)
    return metrics.measure_economics(result, metrics.judge(result, by), by, plan, SPEC)


@given(
    seed=st.integers(0, 2**32 - 1),
    requests=st.integers(1, 60),
    tiers=st.sampled_from([(0,), (3,), (0, 2), (0, 1, 2, 3)]),
    span_s=st.floats(0.0, 90.0),
    drain_s=st.sampled_from([0.0, 7.0, 600.0]),
    policy=st.sampled_from(["static", "stock-fcfs", "reactive"]),
)
@settings(max_examples=40)
def test_the_tiers_costs_sum_to_the_engines_over_any_run(
    seed: int,
    requests: int,
    tiers: tuple[int, ...],
    span_s: float,
    drain_s: float,
    policy: str,
) -> None:
    trace = traffic(seed, requests=requests, tiers=tiers, span_s=span_s)
    money = account(trace, policy=policy, drain_s=drain_s)
    cost = money.usd_per_hour * money.window_s / 3600
    assert money.engine.cost_usd == pytest.approx(cost, rel=1e-9)
    for name in ADDITIVE:
        total = sum(getattr(tier, name) for tier in money.tiers.values())
        assert getattr(money.engine, name) == pytest.approx(total, rel=1e-9), name
    for tier in money.tiers.values():
        parts = tier.compute_usd + tier.kv_held_usd + tier.idle_reserve_usd
        assert tier.cost_usd == pytest.approx(parts, rel=1e-9)
    assert money.window_s >= trace.duration_s


def test_the_window_holds_the_whole_drain() -> None:
    trace = traffic(1, requests=40, tiers=(0, 1, 2, 3), span_s=5.0)
    result = drive(trace, make_policy("static"), PLAN, SPEC, seed=0, drain_s=600.0)
    money = account(trace)
    assert result.end_s > trace.duration_s + 1
    assert money.window_s == pytest.approx(result.end_s)
    # Every service is paid for: what tiers pay for compute is in proportion to it but for the
    # steps' fixed part, which none of it is.
    assert 0 < money.engine.compute_usd < money.engine.cost_usd


def test_a_run_that_never_was_is_idle_for_the_length_of_the_trace() -> None:
    trace = traffic(2, requests=5, tiers=(0,), span_s=60.0)
    nothing = ReplayEngine(trace, PLAN, SPEC).result()
    meter = read_meter(nothing, plan=PLAN, spec=SPEC, duration_s=trace.duration_s)
    assert meter.length_s.tolist() == [trace.duration_s]
    parts = split_cost(meter, 1.0).total_usd / trace.duration_s
    assert parts == pytest.approx([0.7 * 0.55 / 0.85, 0.7 * 0.3 / 0.85, 0.2, 0.1])


def test_what_a_run_did_not_last_of_the_trace_is_idle() -> None:
    trace = traffic(7, requests=5, tiers=(0,), span_s=10.0)
    result = drive(trace, make_policy("static"), PLAN, SPEC, seed=0, drain_s=600.0)
    meter = read_meter(result, plan=PLAN, spec=SPEC, duration_s=100.0)
    assert meter.length_s.sum() == pytest.approx(100.0)
    assert (meter.worked_s[-1], meter.service_ms[-1].sum()) == (0, 0)
    assert meter.guaranteed_blocks[-1] / SPEC.num_gpu_blocks == pytest.approx([0.7, 0.2, 0.1])


def test_tiers_without_requests_pay_their_reserve_and_nothing_else() -> None:
    money = account(traffic(3, requests=10, tiers=(0,), span_s=60.0))
    idle = money.tiers["T2"]
    assert idle.idle_reserve_usd > 0
    assert idle.cost_usd == idle.idle_reserve_usd
    assert (idle.calls, idle.tokens) == (0, 0)
    assert math.isnan(idle.usd_per_1k_calls)


def test_the_plans_price_of_the_engine_counts_before_its_own() -> None:
    trace = traffic(4, requests=10, tiers=(0, 3), span_s=20.0)
    dear = with_values(PLAN, {"engine.cost_per_hour": 12.0})
    assert account(trace).usd_per_hour == SPEC.cost_per_hour
    assert account(trace, dear).usd_per_hour == 12.0
    ratio = account(trace, dear).engine.cost_usd / account(trace).engine.cost_usd
    assert ratio == pytest.approx(12.0 / SPEC.cost_per_hour)


def test_sold_at_the_break_even_price_a_tier_brings_in_what_it_cost() -> None:
    trace = traffic(5, requests=40, tiers=(0, 1, 2, 3), span_s=20.0)
    unpriced = account(trace)
    assert math.isnan(unpriced.engine.revenue_usd)
    prices = {
        f"tiers.{name}.price_per_1m_tokens": tier.break_even_price_per_1m_tokens
        for name, tier in unpriced.tiers.items()
    }
    sold = account(trace, with_values(PLAN, prices))
    for tier in sold.tiers.values():
        assert tier.revenue_usd == pytest.approx(tier.cost_usd)
        assert tier.margin_usd == pytest.approx(0, abs=1e-9 * tier.cost_usd)
    assert sold.engine.margin_usd == pytest.approx(0, abs=1e-9)


def test_a_prompt_is_a_third_of_an_answer_in_the_price() -> None:
    trace = Trace.build(
        arrival_s=[0.0], prompt_tokens=[300], output_tokens=[50], tier=[0], tenant=[0],
        tier_names=("T0",), tenant_names=("a",),
    )  # fmt: skip
    plan = with_values(PLAN, {"tiers.T0.price_per_1m_tokens": 2.0})
    tier = account(trace, plan).tiers["T0"]
    assert tier.revenue_usd == pytest.approx(2.0 * (50 + 300 / 3) / 1e6)
    assert (tier.tokens, tier.output_tokens, tier.calls) == (350, 50, 1)


def test_every_figure_of_an_account_is_finite_where_there_is_traffic() -> None:
    tier = account(traffic(6, requests=30, tiers=(0, 1), span_s=40.0)).tiers["T0"]
    unpriced = {"price_per_1m_tokens", "revenue_usd", "margin_usd"}
    for field in fields(tier):
        assert math.isfinite(getattr(tier, field.name)) == (field.name not in unpriced), field.name
