"""Decodes that verify drafts in the replay: no token, block or millisecond is lost or made up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_bridge.replay.invariants import check_invariants
from tests.engine_bridge.replay.workloads import TIERS, random_trace, small_engine
from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import EngineSpecError
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.drafted_step import accepted_drafts
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.replay.layout import FINISHED

RULES: tuple[RuleSet, ...] = ("fair", "fcfs", "priority")
ALL_ALIKE = tuple((name, 0.6) for name in TIERS)


def plan(most: int = 4) -> Plan:
    return with_values(load_plan(None), {f"tiers.{name}.draft_tokens": most for name in TIERS})


def drafting(spec: EngineSpec, **facts: object) -> EngineSpec:
    values: dict[str, object] = {"tokens": 4, "acceptance": ALL_ALIKE} | facts
    return replace(spec, draft=DraftSpec(**values))  # type: ignore[arg-type]


@pytest.mark.parametrize("rules", RULES)
@given(
    seed=st.integers(0, 10_000),
    blocks=st.integers(150, 900),
    seqs=st.integers(1, 24),
    tokens=st.integers(1, 15),
    kept=st.sampled_from([1.0, 0.7]),
)
@settings(max_examples=15, deadline=None)
def test_counts_hold_at_every_interval_and_every_request_ends(
    rules: RuleSet, seed: int, blocks: int, seqs: int, tokens: int, kept: float
) -> None:
    spec = drafting(small_engine(blocks=blocks, seqs=seqs), tokens=tokens, kept=kept)
    engine = ReplayEngine(random_trace(seed, requests=60), plan(), spec, rules=rules)
    rng = np.random.default_rng(seed)
    while not engine.finished:
        engine.advance(float(rng.uniform(0.01, 0.6)))
        check_invariants(engine._state)
        assert engine.now_s < 1e5
    q = engine.result().requests
    done = q["outcome"] == FINISHED
    assert np.array_equal(q["generated_tokens"][done], q["output_tokens"][done])
    assert (q["generated_tokens"] <= q["output_tokens"]).all()
    assert engine._state.pools.held.sum() == 0
    assert np.allclose(engine._state.tiers.outstanding_ms, 0.0, atol=1e-6)


@pytest.mark.parametrize("rules", RULES)
def test_service_adds_up_to_the_engine_s_busy_time(rules: RuleSet) -> None:
    spec = drafting(small_engine(), us_per_token=30.0, pass_ms=0.2)
    engine = ReplayEngine(random_trace(3), plan(), spec, rules=rules)
    engine.run(interval_s=2.0)
    result = engine.result()
    assert result.drafts[0].drafts > 0
    assert result.requests["service_ms"].sum() == pytest.approx(result.engine_busy_s * 1e3)


@pytest.mark.parametrize("rules", RULES)
def test_telemetry_counts_every_token_and_draft(rules: RuleSet) -> None:
    engine = ReplayEngine(random_trace(5), plan(), drafting(small_engine()), rules=rules)
    engine.run(interval_s=0.5)
    result = engine.result()
    counted = sum(tier.decode_tokens for t in result.telemetry for tier in t.tiers)
    assert counted == result.requests["generated_tokens"].sum()
    shares = [t.tiers[0].acceptance for t in result.telemetry if t.tiers[0].acceptance >= 0]
    assert shares
    assert all(0.0 <= share <= 1.0 for share in shares)


@pytest.mark.parametrize("rules", RULES)
def test_a_draft_model_for_nobody_changes_nothing(rules: RuleSet) -> None:
    # Nothing is known of any request's acceptance. Prompts of which one token is left are padded
    # by vLLM all the same: without prefix caching there are none.
    trace, spec = random_trace(7), small_engine(caching=False)
    digests = set()
    for one in (spec, drafting(spec, acceptance=())):
        engine = ReplayEngine(trace, plan(), one, rules=rules, collapse=False)
        engine.run(interval_s=2.0)
        q = engine.result().requests
        digests.add(b"".join(q[name].tobytes() for name in ("first_token_s", "last_token_s")))
    assert len(digests) == 1


def test_what_is_accepted_depends_on_the_place_only() -> None:
    rng = np.random.default_rng(1)
    for row, place, drafts in rng.integers(0, 10_000, (200, 3)) % (10_000, 5_000, 6):
        whole = accepted_drafts(row, place, 8, 0.7, 1.0)
        assert accepted_drafts(row, place, drafts, 0.7, 1.0) == min(drafts, whole)


@pytest.mark.parametrize(("share", "kept"), [(0.75, 1.0), (0.4, 1.0), (0.8, 0.6)])
def test_drafts_are_accepted_as_often_as_said(share: float, kept: float) -> None:
    counts = [accepted_drafts(row, 300, 2, share, kept) for row in range(40_000)]
    assert np.mean(np.array(counts) >= 1) == pytest.approx(share, abs=0.01)
    assert np.mean(np.array(counts) >= 2) == pytest.approx(share * share * kept, abs=0.01)


def test_an_engine_refuses_drafts_that_its_step_cannot_hold() -> None:
    for spec in (small_engine().with_limits(block_size=4), small_engine(tokens=64, seqs=16)):
        with pytest.raises(EngineSpecError, match=r"draft\.tokens.*at most 3"):
            ReplayEngine(random_trace(1, requests=2), plan(), drafting(spec))
