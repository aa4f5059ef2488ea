"""The judgement of a sweep's points: beaten, knee, price, on counts made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trimtab.training.economics.frontier import Counts, Frontier, Setting, find_frontier
from trimtab.training.report.frontier import verdict
from trimtab.training.whatif.statistics import BINS


def setting(
    reserve: float,
    attainment: float,
    goodput: float,
    *,
    is_plan: bool = False,
    noise: float = 0.0,
    seed: int = 0,
) -> Setting:
    """One point with 100 requests and `goodput` tokens in each bin of a second."""
    rng = np.random.default_rng(seed)
    wobble = noise * rng.standard_normal((2, BINS))
    good = goodput * (1 + wobble)
    return Setting(
        reserve=reserve,
        is_plan=is_plan,
        within_bounds=True,
        counts=Counts(
            asked=np.full((2, BINS), 100.0),
            attained=100 * np.clip(attainment + wobble, 0, 1),
            good_tokens=good,
            others_good_tokens=good / 2,
            weighted_good_tokens=good * 3,
            seconds=1.0,
        ),
        tier_attainment={"T0": attainment},
        usd_per_1m_good_tokens=1.0,
        tier_usd_per_hour=1.0,
    )


def judged(*settings: Setting) -> Frontier:
    return find_frontier(settings, tier="T0", knobs=("kv",), usd_per_hour=4.0)


def test_a_trade_has_a_price_and_a_knee_where_it_bends() -> None:
    found = judged(
        setting(0.0, 0.80, 1000),
        setting(0.5, 0.95, 980, is_plan=True),
        setting(1.0, 0.98, 800),
    )
    assert not any(point.dominated for point in found.points)
    assert found.knee is found.plan
    price = found.price
    assert price.shown
    assert (price.reserve_from, price.reserve_to) == (0.0, 1.0)
    assert price.attainment_points.mean == pytest.approx(18.0)
    # A fifth of the goodput is gone, so a fifth of the engine's cost bought the points.
    assert price.usd_per_hour.mean == pytest.approx(0.8)
    assert price.usd_per_hour_a_point.mean == pytest.approx(0.8 / 18)
    assert [p.forgone_usd_per_hour.mean for p in found.points] == pytest.approx([0, 0.08, 0.8])


def test_a_straight_frontier_has_no_knee() -> None:
    found = judged(
        setting(0.0, 0.8, 1000), setting(0.5, 0.84, 880, is_plan=True), setting(1.0, 0.9, 800)
    )
    assert found.price.shown
    assert found.knee is None


def test_a_point_that_another_beats_in_both_is_marked() -> None:
    found = judged(
        setting(0.0, 0.80, 900), setting(0.5, 0.90, 1000), setting(0.7, 0.85, 950, is_plan=True)
    )
    assert [point.dominated for point in found.points] == [True, False, True]
    assert not found.price.shown
    assert found.knee is None
    assert found.price.reserve_from == found.price.reserve_to == 0.5


def test_what_chance_explains_is_not_ranked() -> None:
    points = [setting(i / 4, 0.9, 1000, noise=0.05, seed=i, is_plan=i == 2) for i in range(5)]
    found = judged(*points)
    assert not found.matters
    assert not any(point.dominated for point in found.points)
    assert not found.price.shown


def test_equal_points_differ_by_nothing_and_beat_nobody() -> None:
    found = judged(setting(0.1, 0.9, 100), setting(0.5, 0.9, 100, is_plan=True))
    assert not found.matters
    assert [p.attainment_gain.mean for p in found.points] == [0.0, 0.0]
    assert not any(point.dominated for point in found.points)


def test_the_plans_reserve_costs_the_others_what_they_would_serve_without() -> None:
    found = judged(setting(0.0, 0.8, 1000), setting(0.5, 0.9, 800, is_plan=True))
    # The others lose 100 tokens/s of the 800 that the engine's 4 USD an hour make.
    assert found.opportunity_usd_per_hour.mean == pytest.approx(4.0 * 100 / 800)


def told(found: Frontier) -> str:
    return " ".join(verdict(found))


def test_the_verdict_says_what_a_point_costs() -> None:
    words = told(
        judged(
            setting(0.0, 0.80, 1000), setting(0.5, 0.95, 980, is_plan=True), setting(1.0, 0.98, 800)
        )
    )
    assert "from 80.00 % (at 0 %) to 98.00 % (at 100 %)" in words
    assert "gains +18.0 (+18.0 to +18.0) points" in words
    assert "$0.044 ($0.044 to $0.044) an hour for a point, of the engine's $4.00" in words
    assert "bends at 50 %" in words
    assert "beaten by no point" in words


def test_the_verdict_tells_what_is_free_from_what_is_not_to_be_had() -> None:
    plan = setting(0.5, 0.90, 1000, is_plan=True)
    assert "Attainment costs no goodput here: 90 %" in told(judged(plan, setting(0.9, 0.95, 1100)))
    free = told(judged(plan, setting(0.9, 0.95, 999.9, noise=0.01)))
    assert "costs no goodput beyond chance" in free
    nothing = told(judged(plan, setting(0.1, 0.905, 900, noise=0.05)))
    assert "No attainment beyond chance" in nothing


def test_the_verdict_names_what_beats_the_plan() -> None:
    words = told(judged(setting(0.1, 0.95, 1100), setting(0.5, 0.9, 1000, is_plan=True)))
    assert "is beaten: 10 % reserved gives 95.00 % and 1,100 tokens/s" in words


def test_a_tier_without_requests_has_no_attainment_and_no_price() -> None:
    empty = setting(0.0, 0.0, 1000)
    counts = {**vars(empty.counts), "asked": np.zeros((2, BINS))}
    made = Setting(**{**vars(empty), "counts": Counts(**counts), "is_plan": True})
    found = judged(made)
    assert math.isnan(found.plan.attainment.mean)
    assert not found.price.shown
