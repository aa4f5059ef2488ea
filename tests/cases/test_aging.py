"""Waiting for ever: requests that the order passes again and again, with ageing and without.

The order of rules 1 and 14 is fair to every tenant, so a crowd of ever new ones may pass a long
request for as long as it comes; and weights of 8,800 to 1 keep a lowest tier out for hours. Ageing
ends both within the plan's windows.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.cases.replaying import T0, T3, Columns, Row, engine_spec, replay, trace_of, ttft_s
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.report import ReplayResult

LASTS_S, RATE = 40, 24
"""The crowd: for so long so many new tenants a second, each with one request. About 5 % too many
for the engine."""
TTFT_S = 0.8


def plan(**aging: float) -> Plan:
    """The shipped plan without shedding, which would end the wait by refusing."""
    changes: dict[str, object] = {f"aging.{name}": value for name, value in aging.items()}
    return with_values(load_plan(None), {"rules.late_shedding": False, **changes})


def crowd(*patient: Row) -> tuple[list[Row], tuple[str, ...]]:
    """The crowd in T0 and who waits among it, as tenant 0."""
    count = LASTS_S * RATE
    rows = [Row(n / RATE, T0, 2000, 8, tenant=n + 1) for n in range(count)]
    return rows + list(patient), tuple(str(n) for n in range(count + 1))


def run(how: Plan, *patient: Row) -> tuple[ReplayResult, Columns]:
    rows, names = crowd(*patient)
    result = replay(trace_of(rows, tenant_names=names), engine_spec(), plan=how)
    return result, result.requests


def waits(q: Columns) -> tuple[np.ndarray, float]:
    """The patient tenant's waits, and which part of the crowd met its TTFT."""
    patient = q["tenant"] == 0
    wait = ttft_s(q)
    return wait[patient], float(np.mean(wait[~patient] <= TTFT_S))


@pytest.mark.parametrize("feasible", [True, False], ids=["rule-14", "rule-1"])
def test_a_crowd_of_strangers_passes_a_long_prompt_until_it_ages(feasible: bool) -> None:
    """Its prefill alone takes longer than the TTFT target: rule 14 counts it as late at once."""
    long = Row(2.0, T0, 30_000, 8)

    def outcome(how: Plan) -> tuple[float, float]:
        how = with_values(how, {"rules.feasible_first": feasible})
        (wait,), met = waits(run(how, long)[1])
        return float(wait), met

    usual_s, usual_met = outcome(plan())
    aged_s, aged_met = outcome(plan(tenant_window_ms=6000.0, full_after_s=5.0, due_every=16))
    assert usual_s > LASTS_S - 2.0
    assert aged_s < 8.0
    if feasible:
        # What it costs the crowd: those that are lost anyway are served now and then too.
        assert usual_met > 0.9
        assert aged_met > usual_met - 0.08


def test_a_low_tier_comes_to_its_turn_but_never_across_the_window() -> None:
    """Twenty requests of T3 ask for more than the window: only the first ones are served early."""
    window_ms = 250.0
    low = [Row(2.0, T3, 1000, 40) for _ in range(20)]
    usual, _ = waits(run(plan(), *low)[1])
    result, q = run(plan(tier_window_ms=window_ms, full_after_s=5.0), *low)
    aged, _ = waits(q)
    assert np.all(usual > LASTS_S - 2.0)
    early = aged < 10.0
    assert early.any()
    assert not early.all()
    # T3 has weight 1: normalised service is service.
    served_ms = q["service_ms"][q["tenant"] == 0][early]
    assert served_ms.sum() <= window_ms + served_ms.max()
    assert result.service_gap_ms <= result.service_gap_bound_ms
