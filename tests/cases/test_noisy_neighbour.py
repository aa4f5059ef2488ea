"""Case 8: a tenant that sends little must not wait for a neighbour that sends thirty times as much.

Published for vLLM behind a proxy: the quiet tenant's P99 TTFT was 29 times its own beside 32
requests a second of a neighbour, 1.14 times with that neighbour held to 10. Both are of one tier
here, the prompts are long enough to fill the engine, and nobody is refused.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases.replaying import FINISHED, T0, T3, Floats, Row, engine_spec, replay, trace_of
from tests.cases.replaying import ttft_s as first_token_s
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.replay.report import ReplayResult
from trimtab.engine_bridge.trace import Trace

QUIET, NOISY = 0, 1
END_S, SETTLED_S = 600.0, 20.0
STEP_MS = 12.0
ISOLATING = {"isolation.longest_step_ms": STEP_MS, "feasible.window_ms": 0}


def traffic(prompt_tokens: int, *, solo: bool = False, noisy_tier: int = T0) -> Trace:
    """The quiet tenant at 1 request a second, the noisy one at 32; the quiet one's are the same."""
    rows = []
    for tenant, rate, tier in ((QUIET, 1.0, T0), (NOISY, 32.0, noisy_tier)):
        rng, at_s = np.random.default_rng([7, tenant]), 0.0
        if solo and tenant == NOISY:
            continue
        while (at_s := at_s + rng.exponential(1 / rate)) < END_S:
            rows.append(Row(at_s, tier, prompt_tokens, 128, tenant))
    return trace_of(rows, tenant_names=("quiet", "noisy"))


def quiet_p99_ms(got: ReplayResult) -> float:
    """Of what came when the engine had learned the answers' lengths."""
    q = got.requests
    late = (q["tenant"] == QUIET) & (q["arrival_s"] > SETTLED_S)
    times: Floats = first_token_s(q)[late] * 1e3
    return float(np.quantile(times, 0.99))


def ratio(prompt_tokens: int, rules: RuleSet, plan: Plan, noisy_tier: int = T0) -> float:
    """The quiet tenant's P99 TTFT over its own alone under stock rules."""
    alone = replay(traffic(prompt_tokens, solo=True), engine_spec(), "fcfs")
    beside = replay(traffic(prompt_tokens, noisy_tier=noisy_tier), engine_spec(), rules, plan=plan)
    return quiet_p99_ms(beside) / quiet_p99_ms(alone)


@pytest.mark.parametrize("rules", ["fcfs", "priority"])
def test_stock_rules_let_the_neighbour_in(rules: RuleSet) -> None:
    assert ratio(512, rules, load_plan()) > 2.5


@pytest.mark.parametrize("noisy_tier", [T0, T3])
def test_isolation_keeps_the_quiet_tenant_near_its_own(noisy_tier: int) -> None:
    assert ratio(512, "fair", with_values(load_plan(), ISOLATING), noisy_tier) < 1.7


def test_isolation_serves_the_neighbour_as_much() -> None:
    plan = with_values(load_plan(), ISOLATING)
    got = replay(traffic(512), engine_spec(), plan=plan)
    stock = replay(traffic(512), engine_spec(), "fcfs")
    assert (got.requests["outcome"] == FINISHED).all()
    assert got.end_s < stock.end_s + 1.0


def test_an_overloading_neighbour_costs_a_step_and_little_more() -> None:
    """More arrives than the engine can serve; the shipped plan's order alone is not enough."""
    plan = with_values(load_plan(), ISOLATING | {"isolation.longest_step_ms": 16.0})
    assert ratio(1024, "fair", load_plan()) > 20.0
    assert ratio(1024, "fair", plan) < 2.4


def test_below_overload_an_order_by_start_and_length_is_no_worse_than_stock() -> None:
    """Rule 14's window lets the neighbour's next prompt pass, not longer, again and again."""
    stock = ratio(896, "fcfs", load_plan())
    assert ratio(896, "fair", load_plan()) > 2.0 * stock
    assert ratio(896, "fair", with_values(load_plan(), {"feasible.prefill_factor": 5.0})) < stock
