"""A tenant whose requests fail is slowed, alone, and finds its way back."""

from __future__ import annotations

import pytest

from tests.engine_bridge.admission.rig import Rig, now, settings
from trimtab.engine_bridge.admission.core import EngineLoad
from trimtab.engine_bridge.admission.outcome import Outcome
from trimtab.engine_bridge.admission.ticket import Ticket

BREAKER = {"failure_fraction": 0.5, "of_last": 4, "slow_to_per_minute": 6, "probe_after_s": 30}


def rig(**more: object) -> Rig:
    return Rig(settings(tenant_breaker=BREAKER, **more))


def ends(one: Rig, *outcomes: Outcome, tenant: str = "acme") -> None:
    for outcome in outcomes:
        now(one.ticket(tenant).finished(outcome=outcome))


def opened() -> Rig:
    """A breaker that has just opened."""
    one = rig()
    ends(one, Outcome.FINISHED, Outcome.FINISHED, Outcome.FAILED, Outcome.TIMED_OUT)
    assert one.admission.slowed_tenants == 1
    return one


def test_it_opens_at_its_threshold_and_not_before() -> None:
    one = rig()
    ends(one, Outcome.FAILED, Outcome.FAILED, Outcome.FAILED)
    one.ticket()
    assert one.admission.slowed_tenants == 0
    ends(one, Outcome.FINISHED)
    assert one.admission.slowed_tenants == 1
    refused = one.refusal()
    assert (refused.status, refused.code, refused.retry_after_s) == (429, "tenant_slowed", 10.0)


def test_only_the_last_ones_count() -> None:
    one = rig()
    ends(one, Outcome.FAILED, *[Outcome.FINISHED] * 4, Outcome.FAILED, *[Outcome.FINISHED] * 3)
    ends(one, Outcome.FAILED, *[Outcome.FINISHED] * 3)
    assert one.admission.slowed_tenants == 0


@pytest.mark.parametrize(
    "outcome", [Outcome.CANCELLED, Outcome.INVALID, Outcome.REFUSED, Outcome.UNREACHABLE]
)
def test_what_says_nothing_about_the_tenant_does_not_count(outcome: Outcome) -> None:
    one = rig()
    ends(one, *[outcome] * 50)
    assert one.admission.slowed_tenants == 0


def test_others_never_notice() -> None:
    one = opened()
    for _ in range(100):
        ends(one, Outcome.FINISHED, tenant="bolt")
    one.refusal("acme")


def test_it_slows_and_does_not_shut_out() -> None:
    one = opened()
    passed = 0
    for _ in range(29 * 4):
        one.clock.s += 0.25
        passed += isinstance(one.admit(), Ticket)
    assert passed == 2  # one every 10 s of 29


def test_a_probe_that_ends_well_closes_it() -> None:
    one = opened()
    one.clock.s += 30
    probe = one.ticket()
    assert one.refusal().retry_after_s == 10.0
    now(probe.finished(outcome=Outcome.FINISHED))
    ends(one, *[Outcome.FINISHED] * 20)
    assert one.admission.slowed_tenants == 0


def test_a_probe_that_fails_begins_the_wait_anew() -> None:
    one = opened()
    one.clock.s += 30
    now(one.ticket().finished(outcome=Outcome.TIMED_OUT))
    one.clock.s += 10
    second = one.ticket()  # not a probe: it proves nothing
    now(second.finished(outcome=Outcome.FINISHED))
    assert one.admission.slowed_tenants == 1
    one.clock.s += 20
    now(one.ticket().finished(outcome=Outcome.FINISHED))
    assert one.admission.slowed_tenants == 0


@pytest.mark.parametrize("end", ["cancelled", "lost"])
def test_a_probe_that_proves_nothing_makes_place_for_another(end: str) -> None:
    one = opened()
    one.clock.s += 30
    probe = one.ticket()
    if end == "cancelled":
        now(probe.finished(outcome=Outcome.CANCELLED))
    one.clock.s += 30
    now(one.ticket().finished(outcome=Outcome.FINISHED))
    assert one.admission.slowed_tenants == 0


def test_a_slowed_tenant_is_told_of_its_quota_too() -> None:
    one = rig(T0={"requests_per_minute": 4})
    ends(one, *[Outcome.FAILED] * 4)
    refused = one.refusal()
    assert (refused.code, refused.retry_after_s) == ("tenant_slowed", 61.0)


def test_so_is_one_whose_tier_gives_way() -> None:
    full = EngineLoad(queue_length=99, kv_use_fraction=0.5, age_s=0)
    loads: list[EngineLoad | None] = [None]
    rules = settings(T3={"requests_per_minute": 1}, saturation={"queue_length": 10})
    one = Rig(rules, more={"load": lambda model: loads[-1]})
    one.ticket(tier="T3")
    loads.append(full)
    refused = one.refusal(tier="T3")
    assert (refused.status, refused.retry_after_s) == (503, 61.0)


def test_without_a_breaker_nobody_is_slowed() -> None:
    one = Rig(settings(tenant_breaker=None))
    ends(one, *[Outcome.FAILED] * 100)
    one.ticket()
