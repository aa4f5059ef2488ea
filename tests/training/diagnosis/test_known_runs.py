"""The right name for each run whose trouble is known, from its requests and from its telemetry."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.diagnosis.known import RUNS, Known
from trimtab.agents.registry import make_policy
from trimtab.training.diagnosis.diagnosis import HEALTHY, Diagnosis, diagnose
from trimtab.training.diagnosis.live_signs import live_signs
from trimtab.training.diagnosis.observed import of_run
from trimtab.training.diagnosis.signs import signs_of


def diagnosed(known: Known, *, live: bool = False) -> Diagnosis:
    """Replay a run and diagnose it."""
    result = known.run()
    fair = make_policy(known.policy).engine_rules == "fair"
    if live:
        signs = live_signs(tuple(result.telemetry), known.plan, known.spec)
    else:
        signs = signs_of(
            of_run(result, known.trace),
            known.plan,
            known.spec,
            fair_rules=fair,
            telemetry=result.telemetry,
            counts=result.drafts,
        )
    return diagnose(signs, known.plan, known.spec, source="a run")


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_the_trouble_that_was_put_there_is_named(number: int) -> None:
    trouble, make = RUNS[number]
    assert diagnosed(make(np.random.default_rng([0, number]))).primary == trouble


def test_telemetry_alone_names_nearly_all() -> None:
    # Whether drafts pay metrics do not tell: they show the longest length, not the chosen one.
    wrong = [
        (number, trouble, found)
        for number, (trouble, make) in enumerate(RUNS)
        if trouble != "draft_mismatch"
        and (found := diagnosed(make(np.random.default_rng([7, number])), live=True).primary)
        != trouble
    ]
    assert len(wrong) <= 2, wrong


@pytest.mark.parametrize("number", [n for n, (trouble, _) in enumerate(RUNS) if trouble != HEALTHY])
def test_what_is_proposed_helps(number: int) -> None:
    """The remedy replayed: the tier that was hurt most fares better, or is healthy."""
    trouble, make = RUNS[number]
    known = make(np.random.default_rng([3, number]))
    before = diagnosed(known)
    remedy = before.remedy
    plan = before.remedied_plan() or known.plan
    if plan == known.plan and remedy.policy is None:
        assert remedy.advice, "nothing to try, and nothing said"
        return
    policy = remedy.policy or known.policy
    after = diagnosed(
        Known(trace=known.trace, plan=plan, spec=known.spec, policy=policy),
    )
    tier = before.findings[0].tier
    if trouble == "draft_mismatch":
        assert after.primary != trouble
        return
    if trouble != "overload":
        assert after.signs.tiers[tier].badly_served < 0.5 * before.signs.tiers[tier].badly_served
    if trouble == "infeasible_plan":
        assert tier not in {
            finding.tier for finding in after.findings if finding.signature == trouble
        }
