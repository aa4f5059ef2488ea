"""The what-if over the real replay engine: small traffic, every kind of contender."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.training.fluid_engine import mixed_trace
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.pricing import priced_tokens
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.training.report.page import render
from trimtab.training.whatif import metrics
from trimtab.training.whatif.run import Contender, Outcome, Study, run_study

PLAN = load_plan()
POLICIES = ("static", "stock-fcfs", "stock-priority", "reactive")


@pytest.fixture(scope="module")
def study() -> Study:
    """Three minutes that ask for more than the engine has."""
    return Study(
        trace=mixed_trace(hours=0.05, rate_per_s=14.0),
        plan=PLAN,
        contenders=tuple(Contender(label=p, policy=p, plan=PLAN) for p in POLICIES),
        spec=get_engine_spec("h100:llama-3.1-8b-tp1"),
        drain_s=600.0,
        keep_requests=True,
    )


@pytest.fixture(scope="module")
def outcome(study: Study) -> Outcome:
    return run_study(study, processes=1)


def test_contenders_differ_and_each_request_is_accounted_for(outcome: Outcome) -> None:
    digests = {run.engine.digest for run in outcome.result.results}
    assert len(digests) >= 3
    for run in outcome.result.results:
        for m in run.tiers.values():
            assert m.finished + m.refused + m.unfinished + m.cancelled == m.requests


def test_fair_sharing_serves_the_paying_tier_better_than_stock(outcome: Outcome) -> None:
    attained = {run.policy: run.tiers["T0"].attainment for run in outcome.result.results}
    assert attained["static"] > attained["stock-fcfs"]


def test_the_service_gap_stays_under_its_bound(outcome: Outcome) -> None:
    for run in outcome.result.results:
        gap, bound = run.fairness.service_gap_ms, run.fairness.service_gap_bound_ms
        if run.policy.startswith("stock"):
            assert np.isnan(gap)
            assert np.isnan(bound)
        else:
            assert 0 <= gap <= bound


def test_processes_and_repeats_change_nothing(study: Study, outcome: Outcome) -> None:
    again = run_study(study, processes=2)
    assert again.result.to_json() == outcome.result.to_json()
    assert render(again) == render(outcome)


def test_attainment_over_time_agrees_with_the_whole(outcome: Outcome) -> None:
    run = outcome.runs[0]
    share = run.series.attainment[:, 0]
    assert np.nanmin(share) <= run.result.tiers["T0"].attainment <= np.nanmax(share)
    assert (run.series.kv_fraction.sum(axis=1) <= 1 + 1e-9).all()


def test_a_drain_of_nothing_leaves_the_rest_unfinished(study: Study) -> None:
    short = replace(study, drain_s=0.0, contenders=study.contenders[:1])
    data = json.loads(run_study(short, processes=1).result.to_json())
    tiers = data["results"][0]["tiers"].values()
    assert sum(m["unfinished"] for m in tiers) > 0


def test_the_telemetry_counts_the_priced_tokens_that_met_their_targets(
    study: Study, outcome: Outcome
) -> None:
    engine = ReplayEngine(study.trace, PLAN, study.spec)
    engine.run(interval_s=2.0)
    seen = np.array([[tier.met_tokens for tier in at.tiers] for at in engine.result().telemetry])
    static = next(run for run in outcome.runs if run.label == "static")
    by = metrics.yardstick(study.trace, PLAN)
    worth = np.where(static.judged.met.every, priced_tokens(study.trace), 0.0)
    expected = np.bincount(by.tier, weights=worth, minlength=len(PLAN.tiers))
    assert expected.sum() > 0
    assert seen.sum(axis=0) == pytest.approx(expected, rel=1e-9)


def test_intervals_are_due_on_a_grid(study: Study) -> None:
    engine = ReplayEngine(study.trace, PLAN, study.spec)
    for number in range(1, 30):
        seen = engine.advance(2.0)
        assert engine.due_s == 2.0 * number
        assert 0.0 <= seen.time_s - engine.due_s < 1.0
