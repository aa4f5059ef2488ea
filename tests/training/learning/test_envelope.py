"""The range of the observations."""

from __future__ import annotations

import numpy as np

from trimtab.training.learning.envelope import BINS, Envelope

WIDTH = 2 / BINS


def test_bounds_are_the_quantiles_to_a_bin() -> None:
    rows = np.random.default_rng(1).uniform(-0.7, 0.4, (20_000, 3)).astype(np.float32)
    envelope = Envelope(3)
    for part in np.array_split(rows, 100):
        envelope.add(part)
    low, high = envelope.bounds()
    expected = np.quantile(rows, [0.001, 0.999], axis=0)
    np.testing.assert_allclose(low, expected[0], atol=1.5 * WIDTH)
    np.testing.assert_allclose(high, expected[1], atol=1.5 * WIDTH)
    assert np.all(low <= expected[0])
    assert np.all(high >= expected[1])


def test_rows_of_one_bin_count_each() -> None:
    envelope = Envelope(1)
    envelope.add(np.full((8, 1), 0.25, np.float32))
    assert envelope.counts.sum() == 8


def test_a_constant_lies_inside_its_bounds_also_at_the_ends() -> None:
    for value in (-1.0, 0.0, 1.0):
        envelope = Envelope(1)
        envelope.add(np.full((50, 1), value, np.float32))
        low, high = envelope.bounds()
        assert low[0] <= value <= high[0]
        assert high[0] - low[0] < 2 * WIDTH


def test_without_observations_nothing_is_outside() -> None:
    low, high = Envelope(2).bounds()
    assert low.tolist() == [-1, -1]
    assert high.tolist() == [1, 1]


def test_counting_goes_on_where_it_stopped() -> None:
    rows = np.random.default_rng(2).uniform(-1, 1, (100, 4)).astype(np.float32)
    whole, first = Envelope(4), Envelope(4)
    whole.add(rows)
    first.add(rows[:60])
    second = Envelope.of(first.counts)
    second.add(rows[60:])
    np.testing.assert_array_equal(second.counts, whole.counts)
