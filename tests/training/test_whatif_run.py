"""A what-if end to end over a test double of the engine: pairing, counts, JSON, Parquet."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.training.fluid_engine import FluidEngine, mixed_trace
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import PlanError, TrimtabError
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.whatif import run as whatif_run
from trimtab.training.whatif.requests_table import SCHEMA, write_requests
from trimtab.training.whatif.run import Contender, Outcome, Study, default_drain_s, run_study

PLAN = load_plan()
SPEC = get_engine_spec("h100:llama-3.1-70b-tp8")
POLICIES = ("static", "stock-fcfs", "stock-priority", "reactive")


@pytest.fixture(autouse=True)
def fluid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whatif_run, "ReplayEngine", FluidEngine)


def study(trace: Trace | None = None, **changes: object) -> Study:
    made = Study(
        trace=mixed_trace(hours=0.05) if trace is None else trace,
        plan=PLAN,
        contenders=tuple(Contender(label=p, policy=p, plan=PLAN) for p in POLICIES),
        spec=SPEC,
        drain_s=600.0,
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whatif_run, "ReplayEngine", FluidEngine)
        return run_study(study(seeds=(0, 1), keep_requests=True), processes=1)


def test_every_contender_runs_on_every_seed_in_order(outcome: Outcome) -> None:
    runs = [(run.policy, run.seed) for run in outcome.result.results]
    assert runs == [(policy, seed) for policy in POLICIES for seed in (0, 1)]


def test_each_request_is_counted_exactly_once(outcome: Outcome) -> None:
    for run in outcome.result.results:
        counted = [m.finished + m.refused + m.unfinished + m.cancelled for m in run.tiers.values()]
        assert counted == [m.requests for m in run.tiers.values()]
        assert sum(counted) == outcome.result.trace.requests


def test_shares_are_shares_and_add_up(outcome: Outcome) -> None:
    for run in outcome.result.results:
        assert 0 <= run.engine.weighted_attainment <= 1
        assert sum(m.service_share for m in run.tiers.values()) == pytest.approx(1.0)
        for m in run.tiers.values():
            assert m.attainment <= min(
                x for x in (m.attainment_ttft, m.attainment_tpot, 1.0) if not math.isnan(x)
            )


def test_the_number_of_processes_changes_nothing() -> None:
    one = run_study(study(), processes=1).result
    many = run_study(study(), processes=3).result
    assert one.to_json() == many.to_json()


def test_the_whole_is_deterministic(outcome: Outcome) -> None:
    again = run_study(study(seeds=(0, 1), keep_requests=True), processes=1)
    assert again.result.to_json() == outcome.result.to_json()


def test_json_has_the_keys_of_schema_1_and_no_nan(outcome: Outcome) -> None:
    text = outcome.result.to_json()
    assert "NaN" not in text
    assert "Infinity" not in text
    data = json.loads(text)
    assert data["schema"] == 1
    assert {"engine", "plan", "trace", "results", "differences"} <= set(data)
    assert {"digest", "requests", "duration_s"} <= set(data["trace"])
    run = data["results"][0]
    assert {"policy", "seed", "tiers", "engine", "fairness"} <= set(run)
    assert {
        "requests", "finished", "refused", "attainment", "ttft_ms", "tpot_ms", "e2e_ms",
        "goodput_tokens_per_s", "preemptions", "recomputed_tokens", "cached_tokens",
        "cost_per_1k_calls",
    } <= set(run["tiers"]["T0"])  # fmt: skip
    assert set(run["tiers"]["T0"]["ttft_ms"]) == {"p50", "p90", "p99"}
    assert {"tokens_per_s", "utilization", "weighted_goodput", "weighted_attainment"} <= set(
        run["engine"]
    )
    assert {"jain", "service_gap_ms", "service_gap_bound_ms"} <= set(run["fairness"])
    money = run["economics"]
    assert {"window_s", "usd_per_hour", "tiers", "engine"} == set(money)
    assert money["tiers"]["T0"]["usd_per_1k_calls"] == run["tiers"]["T0"]["cost_per_1k_calls"]
    assert sum(tier["cost_usd"] for tier in money["tiers"].values()) == pytest.approx(
        money["engine"]["cost_usd"], rel=1e-9
    )
    gap = data["differences"][0]
    assert {"policy", "against", "metric", "mean", "ci95"} <= set(gap)
    assert len(gap["ci95"]) == 2


def test_differences_are_of_the_means_over_seeds(outcome: Outcome) -> None:
    result = outcome.result

    def mean(policy: str) -> float:
        return float(np.mean([r.engine.weighted_attainment for r in result.runs(policy)]))

    for policy in POLICIES[1:]:
        gap = result.difference(policy, "weighted_attainment")
        assert gap is not None
        assert gap.against == "static"
        assert gap.mean == pytest.approx(mean(policy) - mean("static"))
        assert gap.ci95[0] <= gap.ci95[1]


def test_without_static_the_first_contender_is_the_reference() -> None:
    contenders = study().contenders[1:3]
    result = run_study(study(contenders=contenders), processes=1).result
    assert {d.against for d in result.differences} == {"stock-fcfs"}


def test_one_contender_alone_is_compared_with_nothing() -> None:
    result = run_study(study(contenders=study().contenders[:1]), processes=1).result
    assert result.differences == ()


def test_plans_are_measured_by_the_targets_of_the_first() -> None:
    published = load_plan("published")
    contenders = (
        Contender(label="static", policy="static", plan=PLAN),
        Contender(label="static@published", policy="static", plan=published),
    )
    result = run_study(study(contenders=contenders), processes=1).result
    assert result.policies == ("static", "static@published")
    assert result.plan == PLAN.name


def test_what_has_not_ended_when_the_drain_is_over_is_not_served() -> None:
    short = run_study(study(drain_s=0.0, contenders=study().contenders[:1]), processes=1).result
    tiers = short.results[0].tiers
    assert sum(m.unfinished for m in tiers.values()) > 0
    assert sum(m.requests for m in tiers.values()) == short.trace.requests


def test_a_tier_without_requests_is_reported_without_figures() -> None:
    trace = replace(mixed_trace(hours=0.05), tier_names=("T0",), tier=np.zeros(720, np.int32))
    result = run_study(study(trace), processes=1).result
    empty = result.results[0].tiers["T2"]
    assert empty.requests == 0
    assert math.isnan(empty.attainment)
    assert json.loads(result.to_json())["results"][0]["tiers"]["T2"]["attainment"] is None


def test_a_tier_that_the_plan_lacks_is_refused_before_any_run() -> None:
    trace = replace(mixed_trace(hours=0.02), tier_names=("T0", "T1", "T2", "gold"))
    with pytest.raises(PlanError, match="gold"):
        run_study(study(trace))


def test_a_fault_in_a_worker_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FluidEngine, interval_s: float) -> None:
        raise TrimtabError("replay stuck at 3 s")

    monkeypatch.setattr(FluidEngine, "advance", broken)
    with pytest.raises(TrimtabError, match="stuck"):
        run_study(study(), processes=1)


def test_each_run_is_told_as_it_ends() -> None:
    told: list[tuple[str, int]] = []
    run_study(study(), processes=1, on_done=lambda run: told.append((run.label, run.seed)))
    assert told == [(policy, 0) for policy in POLICIES]


def test_the_control_loop_renews_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    ttl_s: list[float | None] = []
    plain = FluidEngine.apply

    def noting(self: FluidEngine, allocation: object, *, ttl_s: float | None = None) -> object:
        noted.append(ttl_s)
        return plain(self, allocation, ttl_s=ttl_s)

    noted = ttl_s
    monkeypatch.setattr(FluidEngine, "apply", noting)
    run_study(study(contenders=study().contenders[:1]), processes=1)
    assert noted
    assert set(noted) == {PLAN.controller.lease_s}


def test_the_table_has_one_row_a_request_policy_and_seed(outcome: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "requests.parquet"
    write_requests(outcome, path)
    table = pq.read_table(path)
    assert table.schema.equals(SCHEMA)
    assert table.num_rows == outcome.result.trace.requests * len(POLICIES) * 2
    assert set(table["policy"].to_pylist()) == set(POLICIES)
    assert set(table["tier"].to_pylist()) == set(PLAN.tiers)
    met = np.array(table["met_targets"].to_pylist()[: outcome.result.trace.requests])
    tier = np.array(table["tier"].to_pylist()[: outcome.result.trace.requests])
    expected = outcome.result.results[0].tiers["T0"].attainment
    assert met[tier == "T0"].mean() == pytest.approx(expected)
    assert [p.name for p in tmp_path.iterdir()] == ["requests.parquet"]


def test_the_drain_covers_twice_the_longest_target() -> None:
    assert default_drain_s(PLAN) == 600.0
    slow = load_plan()
    tiers = dict(slow.tiers)
    tiers["T2"] = tiers["T2"].model_copy(
        update={"targets": tiers["T2"].targets.model_copy(update={"e2e_ms": 1_000_000.0})}
    )
    assert default_drain_s(slow.model_copy(update={"tiers": tiers})) == 2000.0
