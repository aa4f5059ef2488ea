"""The gate: each line alone can stop a promotion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.training.learning.promotion import Measured, judge

GOOD = Measured(
    gain=0.02,
    gain_ci95=(0.01, 0.03),
    tiers_ci95={"T0": (-0.001, 0.004), "T1": (0.01, 0.02)},
    worst=-0.01,
    fallback_fraction=0.0,
)


def test_a_policy_that_gains_passes() -> None:
    report = judge(GOOD)
    assert report.passed
    assert report.failed == ()
    assert len(report.lines) == 5


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"gain_ci95": (-0.0001, 0.02)}, "gain"),
        ({"gain_ci95": (0.0, 0.02)}, "gain"),
        ({"tiers_ci95": {"T0": (-0.0051, 0.1), "T1": (0.0, 0.0)}}, "T0"),
        ({"worst": -0.021}, "worst trace"),
        ({"fallback_fraction": 0.01}, "fall-back"),
    ],
)
def test_each_line_alone_stops_it(change: dict[str, object], line: str) -> None:
    report = judge(replace(GOOD, **change))
    assert not report.passed
    (failed,) = report.failed
    assert line in failed.name


@pytest.mark.parametrize(
    "change",
    [
        {"gain_ci95": (float("nan"), float("nan"))},
        {"worst": float("nan")},
        {"fallback_fraction": float("nan")},
    ],
)
def test_what_was_not_measured_does_not_pass(change: dict[str, object]) -> None:
    assert not judge(replace(GOOD, **change)).passed
    assert not judge(replace(GOOD, **change), margin=0.5).passed


def test_a_margin_lets_an_equal_one_pass_and_no_worse_one() -> None:
    equal = replace(GOOD, gain=0.0, gain_ci95=(-0.002, 0.002))
    assert not judge(equal).passed
    assert judge(equal, margin=0.002).passed
    assert not judge(equal, margin=0.0019).passed
    assert judge(replace(GOOD, gain_ci95=(0.0, 0.0)), margin=0.0).passed


def test_a_line_says_value_and_bound() -> None:
    (failed,) = judge(replace(GOOD, worst=-0.031)).failed
    assert str(failed) == "worst trace: -3.10 pp, must be at least -2.00 pp"
