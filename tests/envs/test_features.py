"""SLO errors out of telemetry; no data stays no data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from tests.conformance.policy_conformance import PLAN, any_run, telemetry, tier_telemetry
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.envs.features import slo_errors


def test_nothing_is_known_of_a_silent_interval() -> None:
    errors = slo_errors(telemetry(PLAN), PLAN)
    assert not errors.known
    assert np.isnan(errors.attainment).all()


def test_zero_samples_are_no_data_whatever_the_figure_says() -> None:
    tiers = [tier_telemetry(attainment=0.0, attainment_samples=0) for _ in PLAN.tiers]
    assert not slo_errors(telemetry(PLAN, tiers), PLAN).known


def test_errors_are_positive_where_the_tier_is_worse_than_promised() -> None:
    tiers = [tier_telemetry() for _ in PLAN.tiers]
    tiers[0] = tier_telemetry(
        attainment=0.5, attainment_samples=10**9, ttft_ms_p99=1600.0, tpot_ms_p99=20.0
    )
    errors = slo_errors(telemetry(PLAN, tiers), PLAN)
    assert errors.attainment[0] == pytest.approx(0.495)
    assert errors.ttft[0] == pytest.approx(np.log(2))
    assert errors.tpot[0] == pytest.approx(-np.log(2))


def test_a_tier_without_a_target_has_no_error_in_it() -> None:
    tiers = [tier_telemetry(ttft_ms_p99=1e6, tpot_ms_p99=1e6) for _ in PLAN.tiers]
    errors = slo_errors(telemetry(PLAN, tiers), PLAN)
    assert np.isnan(errors.ttft[PLAN.tier_index("T2")])
    assert np.isnan(errors.tpot[PLAN.tier_index("T2")])


@given(any_run())
def test_never_infinite_whatever_comes(run: list[Telemetry]) -> None:
    for seen in run:
        errors = slo_errors(seen, PLAN)
        assert not np.isinf(np.concatenate([errors.attainment, errors.ttft, errors.tpot])).any()
