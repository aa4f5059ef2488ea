"""The four incidents: each before-run shows its own signature, no after-run shows any."""

from __future__ import annotations

import pytest

from trimtab.training.diagnosis.diagnosis import HEALTHY, diagnose
from trimtab.training.diagnosis.observed import of_run
from trimtab.training.diagnosis.signs import signs_of
from trimtab.training.incidents import replayed
from trimtab.training.incidents.incident import AFTER, BEFORE, examine
from trimtab.training.incidents.suite import INCIDENTS

SIGNATURES = {
    "A": "prefill_blocking",
    "B": "kv_avalanche",
    "C": "draft_mismatch",
    "D": "poison_prompt",
}


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_an_incident_is_named_and_its_cure_is_healthy(name: str) -> None:
    runs = examine(INCIDENTS[name], replayed.serve, 0).runs
    found = {}
    for label, fair in ((BEFORE, False), (AFTER, True)):
        run = runs[label]
        signs = signs_of(
            of_run(run.served, run.trace),
            run.plan,
            run.spec,
            fair_rules=fair,
            telemetry=run.served.telemetry,
            counts=run.served.drafts,
        )
        found[label] = diagnose(signs, run.plan, run.spec, source=label).primary
    assert found == {BEFORE: SIGNATURES[name], AFTER: HEALTHY}
