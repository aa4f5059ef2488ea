"""Rule 14 for running prefills: who has a deadline passes who has none to lose, chunk by chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.replaying import (
    FINISHED,
    SHED,
    T0,
    T1,
    T2,
    T3,
    Columns,
    Row,
    engine_spec,
    replay,
    trace_of,
    ttft_s,
)
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine

A, B, C = range(3)
LONG = 100_000
"""Tokens of a prompt that takes 11 s to read here: no tier's TTFT target but T3's is that long."""


def run(*rows: Row, chunks: bool = True, **more: object) -> Columns:
    """Columns of the requests in the order of their arrivals, on a 70B engine."""
    plan = with_values(load_plan(), {"feasible.chunks": chunks, **more})
    trace = trace_of(rows, tenant_names=("a", "b", "c"))
    return replay(trace, get_engine_spec("h100:llama-3.1-70b-tp4"), plan=plan).requests


def test_a_newcomer_does_not_wait_for_a_prompt_that_is_late_anyway() -> None:
    rows = Row(0.0, T1, LONG, 2, A), Row(1.0, T1, 500, 2, B)
    stuck, passed = run(*rows, chunks=False), run(*rows)
    assert stuck["outcome"].tolist() == [FINISHED, SHED]
    assert passed["outcome"].tolist() == [FINISHED, FINISHED]
    # The step that ran, and its own.
    assert ttft_s(passed)[1] < 1.0
    # The long one pays for what passes it, and no more.
    assert 0.0 < ttft_s(passed)[0] - ttft_s(stuck)[0] < 0.05


@pytest.mark.parametrize("beside", [Row(0.5, T0, 4000, 300, C), Row(0.5, T3, 60_000, 300, C)])
def test_nor_beside_other_tiers(beside: Row) -> None:
    q = run(Row(0.0, T1, LONG, 2, A), beside, Row(1.0, T1, 500, 2, B))
    assert ttft_s(q)[2] < 1.0


def test_a_newcomer_takes_its_tier_s_turn_beside_a_tier_that_always_waits() -> None:
    """What it passes does not count in its tag; it would be served after 11 s of the other tier."""
    rows = [Row(0.0, T1, LONG, 2, A), Row(2.0, T1, 500, 2, B)]
    rows += [Row(0.5 + 0.1 * k, T0, 4000, 2, C) for k in range(100)]
    off = {"rules.late_shedding": False, "rules.prefill_shares": False}
    q = run(*rows, **{"tiers.T0.weight": 100.0}, **off)
    assert ttft_s(q)[q["prompt_tokens"] == 500] < 2.0


def test_what_is_passed_does_not_hold_up_other_tiers() -> None:
    """Its tag moves on with what passes it: chat that was idle meanwhile does not wait for it."""
    rows = [Row(0.0, T1, LONG, 2, A)]
    rows += [Row(1.0 + 0.5 * k, T1, 3000, 50, B) for k in range(25)]
    rows += [Row(2.0 + 0.5 * k, T0, 300, 200, C) for k in range(80)]
    q = run(*rows)
    assert q["first_token_s"][q["prompt_tokens"] == LONG].min() > 20.0
    assert ttft_s(q)[q["tier"] == T0].max() < 0.8


def test_a_prompt_that_can_still_be_in_time_is_not_passed() -> None:
    """Two seconds of prefill: its target of 4 s is not put at risk for one that can wait."""
    rows = Row(0.0, T1, 24_000, 2, A), Row(0.3, T1, 500, 2, B)
    q = run(*rows)
    assert q["first_token_s"][0] == run(*rows, chunks=False)["first_token_s"][0]
    assert np.all(ttft_s(q) < 4.0)


def test_one_tenant_s_late_prompts_stay_in_order() -> None:
    q = run(Row(0.0, T1, LONG, 2, A), Row(0.1, T1, 60_000, 2, A), **{"rules.late_shedding": False})
    assert q["first_token_s"][0] < q["first_token_s"][1]


@pytest.mark.parametrize("changes", [{}, {"rules.feasible_first": False}], ids=["T2", "rule-1"])
def test_without_a_target_tenants_share_by_their_finish(changes: dict[str, object]) -> None:
    tier = T1 if changes else T2
    shortly = run(Row(0.0, tier, LONG, 2, A), Row(1.0, tier, 2000, 2, B), **changes)
    assert shortly["first_token_s"][1] < shortly["first_token_s"][0]
    # What is left of the long one is shorter by then.
    late = run(Row(0.0, tier, LONG, 2, A), Row(9.0, tier, 60_000, 2, B), **changes)
    assert late["first_token_s"][0] < late["first_token_s"][1]
    same = run(Row(0.0, tier, 30_000, 2, A), Row(1.0, tier, 20_000, 2, A), **changes)
    assert same["first_token_s"][0] < same["first_token_s"][1]


def test_a_share_holds_between_prompts_that_are_read() -> None:
    """A tenant with most of the share is not passed by a prompt that is a little shorter."""
    rows = Row(0.0, T2, LONG, 2, A), Row(1.0, T2, 50_000, 2, B)
    equal = run(*rows)
    assert equal["first_token_s"][1] < equal["first_token_s"][0]
    more = run(*rows, **{"tenants.a": {"tier": "T2", "share": 4.0}})
    assert more["first_token_s"][0] < more["first_token_s"][1]


def test_a_crowd_passes_a_long_prompt_until_it_is_due() -> None:
    """Ever new tenants, more than the engine can serve; ageing ends it as it does for who waits."""
    lasts_s, rate = 16, 24
    rows = [Row(0.0, T0, 30_000, 8, 0)]
    rows += [Row(0.05 + n / rate, T0, 2000, 8, n + 1) for n in range(lasts_s * rate)]
    trace = trace_of(rows, tenant_names=tuple(str(n) for n in range(len(rows))))
    plan = with_values(load_plan(), {"feasible.chunks": True})
    aging = {"aging.tenant_window_ms": 6000.0, "aging.full_after_s": 5.0}
    usual, aged = (
        replay(trace, engine_spec(), plan=how).requests for how in (plan, with_values(plan, aging))
    )
    assert ttft_s(usual)[0] > lasts_s
    assert ttft_s(aged)[0] < 10.0


@settings(max_examples=12, deadline=None)
@given(
    per_s=st.floats(1.0, 30.0),
    tokens=st.integers(100, 8000),
    window_ms=st.sampled_from((0.0, 1500.0)),
    tier=st.sampled_from((T1, T2)),
    seed=st.integers(0, 1000),
)
def test_a_passed_prompt_is_read_in_the_end(
    per_s: float, tokens: int, window_ms: float, tier: int, seed: int
) -> None:
    """One tenant floods the tier; the long prompt gets its half of the time, and the window's."""
    rng = np.random.default_rng(seed)
    rows, at_s = [Row(0.0, tier, LONG, 2, A)], 0.0
    while (at_s := at_s + rng.exponential(1 / per_s)) < 40.0:
        rows.append(Row(at_s, tier, tokens, 2, B))
    plan = with_values(
        load_plan(),
        {
            "feasible.chunks": True,
            "feasible.window_ms": window_ms,
            "rules.late_shedding": False,
            "prediction.initial_output_tokens": 2,
        },
    )
    engine = ReplayEngine(
        trace_of(rows, tenant_names=("a", "b", "c")),
        plan,
        get_engine_spec("h100:llama-3.1-70b-tp4"),
    )
    engine.run(interval_s=60.0)
    q = engine.result().requests
    assert (q["outcome"] == FINISHED).all()
    alone_s = 11.5
    assert ttft_s(q)[0] < 2.0 * alone_s + 3e-3 * window_ms + 2.0
