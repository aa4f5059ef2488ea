"""Spans, signs and remedies by themselves."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.diagnosis.known import RUNS
from tests.training.diagnosis.test_known_runs import diagnosed
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.training.diagnosis.diagnosis import diagnose
from trimtab.training.diagnosis.remedies import changed_plan
from trimtab.training.diagnosis.signatures import Signature, findings
from trimtab.training.diagnosis.signs import Signs, TierSigns, signs_from_json
from trimtab.training.diagnosis.spans import Cover
from trimtab.training.diagnosis.victims import Cause

NUMBER = {trouble: number for number, (trouble, _) in reversed(list(enumerate(RUNS)))}
TIMES = st.lists(st.tuples(st.integers(0, 60), st.integers(-5, 20)), max_size=12)


@given(spans=TIMES, asked=st.tuples(st.integers(-5, 80), st.integers(0, 40)))
def test_a_cover_is_the_union_of_its_spans(
    spans: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    starts = np.array([start for start, _ in spans], np.float64)
    ends = np.array([start + length for start, length in spans], np.float64)
    covered = {moment for start, length in spans for moment in range(start, start + max(0, length))}
    cover = Cover(starts, ends)
    first, last = asked[0], asked[0] + asked[1]
    inside = cover.of(np.array([float(first)]), np.array([float(last)]))
    assert cover.length == len(covered)
    assert inside[0] == len(covered & set(range(first, last)))


def test_signs_survive_json() -> None:
    _, make = RUNS[NUMBER["kv_avalanche"]]
    found = diagnosed(make(np.random.default_rng(0)))
    again = signs_from_json(json.loads(found.to_json())["signs"])
    assert findings(again, found.plan, get_engine_spec("h100:llama-3.1-8b-tp1")) == found.findings
    assert repr(again) == repr(found.signs)


def test_a_report_names_evidence_and_what_to_try() -> None:
    _, make = RUNS[NUMBER["poison_prompt"]]
    found = diagnosed(make(np.random.default_rng(0)))
    text = "\n".join(found.lines())
    assert "poison_prompt" in text
    assert "200,000 tokens" in text
    assert "policy static instead of stock rules" in text
    assert "tiers.T1.max_prompt_tokens" in text


def test_a_healthy_run_is_told_so_in_one_line() -> None:
    _, make = RUNS[NUMBER["healthy"]]
    found = diagnosed(make(np.random.default_rng(0)))
    assert len(found.lines()) == 1
    assert "healthy" in found.lines()[0]
    assert found.remedied_plan() is None


def tier_signs(**changes: object) -> TierSigns:
    """A tier without trouble."""
    values: dict[str, object] = {
        "requests": 100,
        "missed": 0.0,
        "tail": 0.0,
        "allowed": 0.01,
        "victims": {cause.name.lower(): 0.0 for cause in Cause if cause is not Cause.NONE},
        "ttft_p50_ms": 50.0,
        "ttft_p99_ms": 90.0,
        "alone_p50_ms": 20.0,
        "alone_p99_ms": 40.0,
        "alone_needed_ms": 45.0,
        "alone_tpot_p99_ms": 8.0,
        "load": 0.3,
        "prompt_p99_tokens": 3000.0,
        "preempted": 0.0,
        "found": math.nan,
        "acceptance": math.nan,
        "draft_tokens": 0.0,
        "decode_share": 0.0,
    }
    return TierSigns(**{**values, **changes})  # type: ignore[arg-type]


def signs(batch: float, **tiers: TierSigns) -> Signs:
    """A run of these tiers."""
    return Signs(
        tiers={name: tiers.get(name, tier_signs()) for name in load_plan().tier_names},
        fair_rules=True,
        requests=400,
        preempted=0.0,
        churned=0.0,
        recomputed=0.0,
        long_time=0.0,
        longest_alone_ms=100.0,
        longest_tokens=4000,
        poison_requests=0,
        poison_least_tokens=0,
        poison_tiers=(),
        long_tiers=(),
        batch_mean=batch,
        kv_tokens_mean=batch * 1000.0,
    )


@pytest.mark.parametrize(
    ("batch", "acceptance", "used", "named"),
    [(4.0, 0.8, 4.0, False), (200.0, 0.4, 4.0, True), (256.0, 0.2, 4.0, True)],
)
def test_drafts_are_a_mismatch_only_where_they_cost(
    batch: float, acceptance: float, used: float, named: bool
) -> None:
    spec = get_engine_spec("h100:llama-3.1-8b-tp1")
    hurt = tier_signs(acceptance=acceptance, draft_tokens=used, decode_share=1.0)
    found = diagnose(signs(batch, T2=hurt), load_plan(), spec, source="a run")
    assert (found.primary == Signature.DRAFT_MISMATCH) is named
    if named:
        assert found.findings[0].tier == "T2"
        changed = found.remedied_plan()
        assert changed is not None
        assert changed.tiers["T2"].draft_tokens == found.findings[0].draft_tokens
        assert changed.tiers["T2"].draft_tokens < used


def test_the_most_important_tier_comes_first() -> None:
    few = {**tier_signs().victims, "overload": 0.05}
    many = {**tier_signs().victims, "beyond": 0.9}
    spec = get_engine_spec("h100:llama-3.1-8b-tp1")
    found = findings(
        signs(
            8.0,
            T0=tier_signs(victims=few, missed=0.05),
            T1=tier_signs(victims=many, missed=0.9),
        ),
        load_plan(),
        spec,
    )
    assert [(f.tier, f.signature) for f in found] == [
        ("T0", Signature.OVERLOAD),
        ("T1", Signature.INFEASIBLE_PLAN),
    ]


def test_changes_that_contradict_the_plan_are_refused() -> None:
    plan = load_plan()
    with pytest.raises(ValueError, match="pools"):
        changed_plan(plan, {("pools", "batch"): 0.9})
