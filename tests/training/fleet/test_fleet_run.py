"""A fleet's replay: one engine is the engine itself, nothing is doubled, routes are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.trace import Trace
from trimtab.envs import score
from trimtab.training.fleet.compare import FleetStudy, run_fleets
from trimtab.training.fleet.figures import FleetResult
from trimtab.training.fleet.run import LOST, FleetReplay, FleetRun
from trimtab.training.fleet.settings import Fleet, fleet_from
from trimtab.training.traces.generate import generate
from trimtab.training.whatif.drafting import with_draft_lengths
from trimtab.training.whatif.run import drive

ENGINE = "h100:llama-3.1-8b-tp1"
SPEC = get_engine_spec(ENGINE)
PLAN = load_plan()


@pytest.fixture(scope="module")
def trace() -> Trace:
    """Nine minutes of all tiers, sessions included, that nearly fill one engine."""
    return generate(hours=0.15, seed=3, preset="bursty", load=0.9, spec=SPEC)


def fleet(engines: int | dict[str, Any] = 2, **changes: Any) -> Fleet:
    """So many equal engines, or these, and what a test changes."""
    if isinstance(engines, int):
        engines = {name: {"engine": ENGINE} for name in "abcdef"[:engines]}
    values: dict[str, Any] = {"name": "test", "engines": engines, **changes}
    return fleet_from(values, where="fleet.yaml")


def replay(
    trace: Trace, one: Fleet, policy: str = "static", specs: Mapping[str, EngineSpec] | None = None
) -> FleetRun:
    """Run it."""
    engines = specs or dict.fromkeys(one.engines, SPEC)
    return FleetReplay(trace, one, PLAN, engines, lambda: make_policy(policy)).run()


@pytest.mark.parametrize("policy", ["static", "stock-fcfs", "reactive"])
def test_a_fleet_of_one_is_the_engine_itself(trace: Trace, policy: str) -> None:
    alone = drive(trace, make_policy(policy), PLAN, SPEC, seed=0, drain_s=600.0)
    one = replay(trace, fleet(1), policy)
    for name, column in alone.requests.items():
        np.testing.assert_array_equal(one.requests[name], column, err_msg=name)
    assert one.end_s == pytest.approx(np.nanmax(alone.requests["last_token_s"]), abs=1.0)
    assert one.busy_s["a"] == pytest.approx(alone.engine_busy_s, abs=1e-9)


def test_it_is_paid_for_until_the_last_request_is_over() -> None:
    lone = Trace.build(
        arrival_s=np.arange(0.0, 60.0, 0.5),
        prompt_tokens=500,
        output_tokens=50,
        tier_names=PLAN.tier_names,
    )
    run = replay(lone, fleet(1))
    last_s = np.nanmax(run.requests["last_token_s"].astype(float))
    assert run.end_s == last_s
    assert run.up_s == {"a": last_s}


def test_every_request_ends_once_and_at_one_engine(trace: Trace) -> None:
    run = replay(trace, fleet(3))
    assert set(run.requests["outcome"].tolist()) <= {score.FINISHED, score.SHED, score.CANCELLED}
    assert set(run.requests["engine"].tolist()) == {0, 1, 2}
    shares = np.bincount(run.requests["engine"].astype(int)) / len(trace)
    assert shares.min() > 0.2


def test_the_same_seed_gives_the_same_run(trace: Trace) -> None:
    runs = [replay(trace, fleet(2)) for _ in range(2)]
    for name, column in runs[0].requests.items():
        np.testing.assert_array_equal(runs[1].requests[name], column)


def test_when_an_engine_ends_only_answers_under_way_are_lost(trace: Trace) -> None:
    failing = {"failures": [{"engine": "b", "at_s": 200.0, "down_s": 60.0}]}
    before, run = replay(trace, fleet(2)), replay(trace, fleet(2, **failing))
    outcome = run.requests["outcome"]
    lost = outcome == LOST
    assert 0 < lost.sum() < 100
    assert np.isfinite(run.requests["first_token_s"][lost].astype(float)).all()
    assert (run.requests["first_token_s"][lost].astype(float) <= 200.0).all()
    assert not (outcome == score.UNFINISHED).any()
    # It was neither paid for nor served while it was down and starting.
    assert run.up_s["b"] == pytest.approx(run.end_s - 60.0, abs=1e-6)
    served = run.requests["engine"] == 1
    admitted_s = run.requests["admitted_s"].astype(float)
    assert not (served & (admitted_s > 200.0) & (admitted_s < 200.0 + 60.0 + 180.0)).any()
    assert (before.requests["outcome"] != LOST).all()


def test_who_has_had_no_token_is_served_elsewhere(trace: Trace) -> None:
    engines = {name: {"engine": ENGINE, "start_s": 1.0} for name in "ab"}
    failures = [{"engine": "ab"[n % 2], "at_s": 50.0 + 10.0 * n} for n in range(40)]
    run = replay(trace, fleet(engines, failures=failures))
    outcome, first_s = run.requests["outcome"], run.requests["first_token_s"].astype(float)
    assert run.retried > 0
    assert (outcome[~np.isfinite(first_s)] != LOST).all()
    assert not (outcome == score.UNFINISHED).any()


def test_without_any_engine_requests_wait_and_are_refused(trace: Trace) -> None:
    down = {"failures": [{"engine": "a", "at_s": 100.0, "down_s": 30.0}], "wait_s": 20.0}
    run = replay(trace, fleet(1, **down))
    refused = run.requests["outcome"] == score.REFUSED
    arrival_s = run.requests["arrival_s"].astype(float)
    assert refused.any()
    assert arrival_s[refused].min() >= 80.0
    assert arrival_s[refused].max() <= 100.0 + 30.0 + 180.0
    # Who comes less than the wait before it is back is served.
    late = (arrival_s > 100.0 + 30.0 + 180.0 - 20.0) & (arrival_s < 310.0)
    assert late.any()
    assert not refused[late].any()


def test_a_cold_reserve_costs_nothing_until_the_top_tier_needs_it(trace: Trace) -> None:
    engines = {
        "a": {"engine": ENGINE},
        "r": {"engine": ENGINE, "reserve": True, "warm": False, "start_s": 20.0},
    }
    idle = replay(trace, fleet(engines))
    assert idle.up_s["r"] == 0.0
    failing = {"failures": [{"engine": "a", "at_s": 100.0, "down_s": 200.0}]}
    run = replay(trace, fleet(engines, **failing))
    assert run.up_s["r"] > 0.0
    reserve = run.requests["engine"] == 1
    top = PLAN.tier_names.index("T0")
    assert reserve.any()
    assert set(run.requests["tier"][reserve].tolist()) == {top}


def test_a_cold_engine_that_fails_is_down_for_its_time_and_starts_one_at_a_time(
    trace: Trace,
) -> None:
    cold = {"engine": ENGINE, "warm": False, "start_s": 5.0}
    engines = {"a": {"engine": ENGINE, "start_s": 0.0}, "c": cold, "d": cold}
    failures = [
        {"engine": "a", "at_s": 100.0, "down_s": 1e6},
        {"engine": "c", "at_s": 150.0, "down_s": 1e6},
    ]
    run = replay(trace, fleet(engines, failures=failures))
    # One reserve at a time: the second is started when the first has ended.
    assert run.up_s["c"] == pytest.approx(50.0, abs=1.0)
    assert run.up_s["d"] == pytest.approx(run.end_s - 150.0, abs=1.0)


def test_drafts_are_as_in_the_whatif(trace: Trace) -> None:
    spec = replace(SPEC, draft=DraftSpec(tokens=4, acceptance=(("T0", 0.8), ("T1", 0.8))))
    plan = with_draft_lengths(PLAN, spec)
    alone = drive(trace, make_policy("static"), plan, spec, seed=0, drain_s=600.0)
    one = replay(trace, fleet(1), specs={"a": spec})
    for name, column in alone.requests.items():
        np.testing.assert_array_equal(one.requests[name], column, err_msg=name)


def test_strict_tenants_and_tiers_keep_to_their_engines(trace: Trace) -> None:
    tenant = trace.tenant_names[trace.tenant[0]]
    engines = {
        "own": {"engine": ENGINE, "tenants": [tenant]},
        "paid": {"engine": ENGINE, "tiers": ["T0", "T1"]},
        "rest": {"engine": ENGINE, "tiers": ["T2", "T3"]},
    }
    run = replay(trace, fleet(engines))
    mine = trace.tenant == trace.tenant_names.index(tenant)
    place = run.requests["engine"]
    assert (place[mine] == 0).all()
    paid = np.isin(run.requests["tier"], (0, 1)) & ~mine
    assert (place[paid] == 1).all()
    assert (place[~paid & ~mine] == 2).all()


def test_affinity_finds_what_was_cached_and_a_store_makes_up_for_it(trace: Trace) -> None:
    def found(**changes: Any) -> float:
        run = replay(trace, fleet(3, **changes))
        agents = run.requests["tier"] == 1
        admitted = agents & np.isfinite(run.requests["admitted_s"].astype(float))
        cached = run.requests["cached_tokens"][admitted].astype(float).sum()
        return float(cached / run.requests["prompt_tokens"][admitted].astype(float).sum())

    scattered = {"routing": {"affinity": False}}
    store = {"store": {"gib": 200.0, "gib_per_s": 20.0}}
    with_affinity, without = found(), found(**scattered)
    assert with_affinity > without + 0.05
    assert found(**scattered, **store) > without + 0.05


def test_results_do_not_depend_on_processes(trace: Trace) -> None:
    fleets = (fleet(1, name="one"), fleet(2, name="two"))
    study = FleetStudy(
        trace=trace,
        plan=PLAN,
        fleets=fleets,
        specs=tuple(dict.fromkeys(one.engines, SPEC) for one in fleets),
        policies=("static",),
        seeds=(0,),
        drain_s=600.0,
    )
    told: list[FleetResult] = []
    alone = run_fleets(study, processes=1, on_done=told.append)
    assert told == list(alone)
    assert repr(run_fleets(study, processes=2)) == repr(alone)
    one, two = alone
    assert two.weighted_attainment >= one.weighted_attainment
    assert two.cost_usd == pytest.approx(2 * SPEC.cost_per_hour * two.end_s / 3600.0)
