"""The block bootstrap: paired, deterministic, honest about dependence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.training.whatif.statistics import (
    BINS,
    RatioSample,
    ValueSample,
    draw_bin_counts,
    quantile_difference,
    ratio_difference,
    time_bins,
)


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def sample(shares: np.ndarray, weight: float = 10.0) -> RatioSample:
    return RatioSample(numerator=shares * weight, denominator=np.full(BINS, weight))


def test_equal_runs_differ_by_exactly_nothing() -> None:
    one = sample(rng().uniform(size=BINS))
    found = ratio_difference([(one, one)], rng=rng())
    assert (found.mean, found.low, found.high) == (0.0, 0.0, 0.0)


def test_a_constant_gain_has_no_width_however_noisy_the_level() -> None:
    base = rng().uniform(0.2, 0.6, BINS)
    found = ratio_difference([(sample(base + 0.1), sample(base))], rng=rng())
    assert found.low == pytest.approx(0.1)
    assert found.high == pytest.approx(0.1)
    assert found.settled


def test_swapping_the_sides_mirrors_the_interval() -> None:
    a, b = sample(rng().uniform(size=BINS)), sample(np.full(BINS, 0.5))
    there, back = (ratio_difference([pair], rng=rng()) for pair in ((a, b), (b, a)))
    assert there.mean == pytest.approx(-back.mean)
    assert there.low == pytest.approx(-back.high)


def test_the_same_generator_gives_the_same_interval() -> None:
    pair = (sample(rng().uniform(size=BINS)), sample(np.full(BINS, 0.5)))
    assert ratio_difference([pair], rng=rng()) == ratio_difference([pair], rng=rng())


def test_every_bin_is_drawn_equally_often_on_average() -> None:
    counts = draw_bin_counts(1, 4000, rng())[:, 0]
    assert (counts.sum(axis=1) == BINS).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(BINS), abs=0.15)


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    generator = np.random.default_rng(3)
    covered = 0
    for _ in range(120):
        # Noise that lasts a few bins, as queues do.
        noise = np.convolve(generator.normal(0, 0.1, BINS + 3), np.full(4, 0.5), mode="valid")
        pair = (sample(0.5 + 0.02 + noise), sample(np.full(BINS, 0.5)))
        found = ratio_difference([pair], rng=generator)
        covered += found.low <= 0.02 <= found.high
    assert 0.84 <= covered / 120 <= 1.0


def test_more_seeds_widen_by_what_seeds_differ() -> None:
    base = sample(np.full(BINS, 0.5))
    gains = [sample(np.full(BINS, 0.5 + gain)) for gain in (0.0, 0.1, 0.2)]
    found = ratio_difference([(gain, base) for gain in gains], rng=rng())
    assert found.mean == pytest.approx(0.1)
    assert found.low == pytest.approx(0.0, abs=0.04)
    assert found.high == pytest.approx(0.2, abs=0.04)


def test_empty_bins_weigh_nothing() -> None:
    shares, weights = np.full(BINS, 0.5), np.zeros(BINS)
    weights[::7] = 5.0
    one = RatioSample(numerator=shares * weights, denominator=weights)
    two = RatioSample(numerator=0.25 * weights, denominator=weights)
    found = ratio_difference([(one, two)], rng=rng())
    assert found.mean == pytest.approx(0.25)
    assert found.low == pytest.approx(0.25)


def test_without_any_data_everything_is_unknown() -> None:
    none = RatioSample(numerator=np.zeros(BINS), denominator=np.zeros(BINS))
    found = ratio_difference([(none, none)], rng=rng())
    assert np.isnan([found.mean, found.low, found.high]).all()
    assert not found.settled


def test_a_shifted_latency_shifts_its_quantile() -> None:
    values = rng().lognormal(5, 1, 3000)
    bins = time_bins(np.sort(rng().uniform(0, 600, 3000)), 600.0)
    slow = ValueSample(values=values + 50.0, bins=bins)
    found = quantile_difference([(slow, ValueSample(values=values, bins=bins))], q=0.99, rng=rng())
    assert found.mean == pytest.approx(50.0)
    assert found.low == pytest.approx(50.0)


def test_many_values_give_nearly_the_interval_of_the_exact_quantiles() -> None:
    generator = rng()
    values = generator.lognormal(5, 1, 40_000)
    bins = generator.integers(0, BINS, 40_000)
    whole = ValueSample(values=values, bins=bins)
    twice = ValueSample(values=2 * values, bins=bins)
    found = quantile_difference([(twice, whole)], q=0.99, rng=rng())
    assert found.mean == pytest.approx(np.quantile(values, 0.99), rel=1e-9)
    assert found.low < found.mean < found.high
    assert found.high - found.low < 0.2 * found.mean


def test_unknown_latencies_are_left_out() -> None:
    bins = np.zeros(4, np.int64)
    known = ValueSample(values=np.array([1.0, np.nan, 3.0, np.nan]), bins=bins)
    none = ValueSample(values=np.full(4, np.nan), bins=bins)
    assert np.isnan(quantile_difference([(known, none)], q=0.5, rng=rng()).mean)
    assert quantile_difference([(known, known)], q=0.5, rng=rng()).mean == 0.0


@given(st.lists(st.floats(0, 1e5), max_size=40), st.floats(0, 1e5))
@settings(max_examples=60)
def test_bins_are_always_in_range(starts: list[float], duration_s: float) -> None:
    bins = time_bins(np.array(starts), duration_s)
    assert ((bins >= 0) & (bins < BINS)).all()
