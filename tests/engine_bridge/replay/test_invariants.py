"""The replay under random traffic: its counts stay true, nothing is lost, runs are repeatable."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_bridge.replay.invariants import check_invariants
from tests.engine_bridge.replay.workloads import random_trace, small_engine
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.replay.layout import CANCELLED, FINISHED, REFUSED, SHED

RULES: tuple[RuleSet, ...] = ("fair", "fcfs", "priority")


@pytest.mark.parametrize("rules", RULES)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.integers(150, 900),
    seqs=st.integers(1, 24),
    caching=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_counts_hold_at_every_interval_and_every_request_ends(
    rules: RuleSet, seed: int, blocks: int, seqs: int, caching: bool
) -> None:
    spec = small_engine(blocks=blocks, seqs=seqs, caching=caching)
    engine = ReplayEngine(random_trace(seed, requests=60), load_plan(None), spec, rules=rules)
    rng = np.random.default_rng(seed)
    while not engine.finished:
        engine.advance(float(rng.uniform(0.01, 0.6)))
        check_invariants(engine._state)
        assert engine.now_s < 1e5
    result = engine.result()
    outcome = result.requests["outcome"]
    assert set(outcome.tolist()) <= {FINISHED, REFUSED, SHED, CANCELLED}
    done = outcome == FINISHED
    assert np.array_equal(
        result.requests["generated_tokens"][done], result.requests["output_tokens"][done]
    )
    assert engine._state.pools.held.sum() == 0
    assert np.allclose(engine._state.tiers.outstanding_ms, 0.0, atol=1e-6)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_collapsing_changes_nothing(rules: RuleSet, seed: int) -> None:
    trace, spec = random_trace(seed), small_engine(blocks=500)
    digests = set()
    for collapse in (True, False):
        engine = ReplayEngine(trace, load_plan(None), spec, rules=rules, collapse=collapse)
        while not engine.finished:
            engine.advance(2.0)
        digests.add(engine.result().digest())
    assert len(digests) == 1


@pytest.mark.parametrize("rules", RULES)
def test_service_adds_up_to_the_engine_s_busy_time(rules: RuleSet) -> None:
    engine = ReplayEngine(random_trace(3), load_plan(None), small_engine(), rules=rules)
    while not engine.finished:
        engine.advance(2.0)
    result = engine.result()
    assert result.requests["service_ms"].sum() == pytest.approx(result.engine_busy_s * 1e3)


def test_every_rule_switch_runs() -> None:
    plan = load_plan(None)
    for rule in type(plan.rules).model_fields:
        off = plan.model_copy(update={"rules": plan.rules.model_copy(update={rule: False})})
        engine = ReplayEngine(random_trace(1), off, small_engine(), rules="fair")
        while not engine.finished:
            engine.advance(1.0)
            check_invariants(engine._state)


def test_allocations_change_mid_run_without_losing_a_request() -> None:
    plan = load_plan(None)
    engine = ReplayEngine(random_trace(5), plan, small_engine(), rules="fair")
    rng = np.random.default_rng(5)
    while not engine.finished:
        now = engine.allocation
        engine.apply(
            dataclasses.replace(
                now,
                weights=tuple(w * rng.uniform(0.5, 2.0) for w in now.weights),
                kv_fractions=tuple(rng.dirichlet(np.ones(len(now.kv_fractions)))),
                prefill_budget_tokens=int(rng.integers(100, 4000)),
                version=now.version + 1,
            )
        )
        engine.advance(0.5)
        check_invariants(engine._state)
    assert np.all(engine.result().requests["outcome"] > 0)
