"""The admission core before an engine in virtual time."""

from __future__ import annotations

import pytest

from trimtab.engine_bridge.admission.settings import AdmissionSettings, Limits
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.training.incidents.door import admit
from trimtab.training.incidents.script import Call, trace_of

SPEC, PLAN = get_engine_spec("h100:llama-3.1-70b-tp4"), load_plan()
TENANT, OUTPUT = "one", 10


def call(at_s: float, tier: str, prompt_tokens: int) -> Call:
    return Call(
        arrival_s=at_s, tier=tier, tenant=TENANT, prompt_tokens=prompt_tokens, output_tokens=OUTPUT
    )


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(max_prompt_tokens=100_000), "413 prompt_too_long"),
        (Limits(max_prefill_ms=4000.0), "413 prefill_too_long"),
    ],
)
def test_a_prompt_over_its_tiers_length_is_refused_and_others_pass(
    limits: Limits, code: str
) -> None:
    trace = trace_of([call(0.0, "T1", 1000), call(1.0, "T1", 200_000), call(2.0, "T2", 200_000)])
    passed, refusals = admit(trace, AdmissionSettings(tiers={"T1": limits}), PLAN, SPEC)
    assert refusals == {code: 1}
    assert passed.arrival_s.tolist() == [0.0, 2.0]
    assert passed.prompt_tokens.tolist() == [1000, 200_000]


def test_quotas_hold_by_the_traces_clock() -> None:
    calls = [call(second, "T1", 100) for second in (0.0, 1.0, 2.0, 63.0)]
    settings = AdmissionSettings(tiers={"T1": Limits(requests_per_minute=2)})
    passed, refusals = admit(trace_of(calls), settings, PLAN, SPEC)
    assert refusals == {"429 requests_quota": 1}
    assert passed.arrival_s.tolist() == [0.0, 1.0, 63.0]
