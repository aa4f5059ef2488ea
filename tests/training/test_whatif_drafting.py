"""A draft model for a what-if: flags onto the engine, lengths into plans that have none."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec, get_engine_spec
from trimtab.engine_bridge.errors import EngineSpecError, FlagError
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.trace import Trace
from trimtab.training.whatif.drafting import check_acceptance, with_draft, with_draft_lengths
from trimtab.training.whatif.run import Contender, Study, run_study

SPEC = get_engine_spec("h100:llama-3.1-8b-tp1")
PLAN = load_plan()
FLAGS: dict[str, object] = {"tokens": None, "us_per_token": None, "acceptance": None}


def drafting(spec: EngineSpec = SPEC, **flags: object) -> EngineSpec:
    return with_draft(spec, PLAN, **(FLAGS | flags))  # type: ignore[arg-type]


def test_flags_make_a_draft_model_or_change_the_file_s() -> None:
    made = drafting(tokens=4, us_per_token=20.0, acceptance="T0=0.75, T2=0.4")
    assert made.draft == DraftSpec(
        tokens=4, us_per_token=20.0, acceptance=(("T0", 0.75), ("T2", 0.4))
    )
    assert drafting(made, tokens=2).draft == replace(made.draft, tokens=2)
    assert drafting(made, tokens=0) == SPEC
    assert drafting(made) == made
    assert drafting() == SPEC


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"tokens": 65}, "--draft-tokens.*65.*from 0 to 64"),
        ({"us_per_token": 5.0}, "--draft-us.*beside a draft model.*--draft-tokens"),
        ({"tokens": 4, "us_per_token": -1.0}, "--draft-us.*-1"),
        ({"tokens": 4, "acceptance": "T9=0.5"}, "--acceptance.*T9=0.5.*tiers of the plan"),
        ({"tokens": 4, "acceptance": "T0=0.5,T0=0.6"}, "--acceptance.*each once"),
        ({"tokens": 4, "acceptance": "T0=high"}, "--acceptance.*from 0 to 1"),
        ({"tokens": 4, "acceptance": "T0=1.5"}, "--acceptance.*from 0 to 1"),
    ],
)
def test_a_bad_flag_is_named(flags: dict[str, object], told: str) -> None:
    with pytest.raises(FlagError, match=told):
        drafting(**flags)


def test_drafts_must_fit_the_engine() -> None:
    with pytest.raises(EngineSpecError, match=r"draft\.tokens.*at most 15"):
        drafting(tokens=16)


def _trace(**columns: object) -> Trace:
    rng = np.random.default_rng(1)
    return Trace.build(
        arrival_s=np.sort(rng.uniform(0, 5, 40)),
        prompt_tokens=rng.integers(50, 500, 40),
        output_tokens=rng.integers(20, 200, 40),
        tier=rng.integers(0, 4, 40),
        tier_names=PLAN.tier_names,
        **columns,  # type: ignore[arg-type]
    )


def test_a_trace_without_acceptance_needs_the_flag() -> None:
    check_acceptance(_trace(acceptance=np.full(40, 0.5)), drafting(tokens=4))
    check_acceptance(_trace(), drafting(tokens=4, acceptance="T1=0.5"))
    with pytest.raises(FlagError, match="--acceptance"):
        check_acceptance(_trace(), drafting(tokens=4))


def test_a_plan_without_lengths_gets_them_for_all_but_the_least_tier() -> None:
    spec = drafting(tokens=3)
    plan = with_draft_lengths(PLAN, spec)
    assert [tier.draft_tokens for tier in plan.tiers.values()] == [3, 3, 3, 0]
    own = with_values(PLAN, {"tiers.T3.draft_tokens": 2})
    assert with_draft_lengths(own, spec) is own
    assert with_draft_lengths(PLAN, SPEC) is PLAN


def test_what_was_verified_is_told_by_tier() -> None:
    spec = drafting(tokens=4, acceptance="T0=0.8,T1=0.8,T2=0.8,T3=0.8")
    plan = with_draft_lengths(PLAN, spec)
    contenders = tuple(
        Contender(label=name, policy=name, plan=plan) for name in ("static", "stock-fcfs")
    )
    study = Study(trace=_trace(), plan=plan, contenders=contenders, spec=spec, drain_s=60.0)
    fair, stock = run_study(study, processes=1).result.results
    assert fair.speculation is not None
    assert stock.speculation is not None
    assert fair.speculation["T3"].draft_tokens == 0
    assert fair.speculation["T3"].tokens_per_step == 1.0
    for name in ("T0", "T1", "T2"):
        assert 0.0 < fair.speculation[name].acceptance < 1.0
        assert fair.speculation[name].tokens_per_step > 1.5
    # Stock rules verify the same number of everybody.
    assert [drafts.mean_draft_tokens for drafts in stock.speculation.values()] == [4.0] * 4
    plain = run_study(replace(study, spec=SPEC), processes=1).result
    assert plain.draft is None
    assert all(run.speculation is None for run in plain.results)
