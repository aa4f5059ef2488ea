"""The bootstrap: what intervals cover, what is drawn, the interquartile mean."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.training.evaluation.bootstrap import Samples, gain, iqm
from trimtab.training.whatif.statistics import BINS


def samples(difference: np.ndarray, *, noise: float = 0.0, families: list[str]) -> Samples:
    """Runs whose metric differs by `difference`, shape (traces, speeds, seeds)."""
    rng = np.random.default_rng(5)
    shape = (*difference.shape, BINS)
    theirs = rng.uniform(0.3, 0.7, shape)
    ours = theirs + difference[..., None] + rng.normal(0.0, noise, shape)
    return Samples(ours=ours, theirs=theirs, bottom=np.ones(shape), families=families)


def test_the_mean_is_over_all_runs_and_lies_in_its_interval() -> None:
    difference = np.random.default_rng(1).normal(0.02, 0.01, (5, 2, 3))
    found = gain(samples(difference, noise=0.05, families=[""] * 5))
    assert found.mean == pytest.approx(difference.mean(), abs=0.01)
    assert found.ci95[0] < found.mean < found.ci95[1]
    assert found.iqm_ci95[0] < found.iqm < found.iqm_ci95[1]


def test_traces_that_disagree_widen_the_interval() -> None:
    alike = gain(samples(np.full((4, 1, 2), 0.02), noise=0.05, families=[""] * 4))
    apart = np.full((4, 1, 2), 0.02) + np.array([-0.1, 0.1, -0.1, 0.1])[:, None, None]
    mixed = gain(samples(apart, noise=0.05, families=[""] * 4))
    assert alike.shown
    assert not mixed.shown
    assert mixed.ci95[1] - mixed.ci95[0] > 4 * (alike.ci95[1] - alike.ci95[0])


def test_families_keep_their_weight_in_every_resample() -> None:
    # Two kinds of traffic, far apart but each even: which kind is drawn is no matter of chance.
    apart = np.array([0.0, 0.0, 0.2, 0.2])[:, None, None] * np.ones((4, 1, 1))
    as_one = gain(samples(apart, families=[""] * 4))
    as_two = gain(samples(apart, families=["a", "a", "b", "b"]))
    assert as_one.mean == as_two.mean == pytest.approx(0.1)
    assert as_two.ci95 == pytest.approx((0.1, 0.1))
    assert as_one.ci95[1] - as_one.ci95[0] > 0.1


def test_seeds_that_disagree_widen_the_interval() -> None:
    difference = np.full((2, 1, 4), 0.02) + np.array([-0.1, 0.1, -0.1, 0.1])
    assert not gain(samples(difference, families=["", ""])).shown


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for trial in range(40):
        rng = np.random.default_rng(trial)
        truth, traces = 0.01, 8
        level = rng.normal(truth, 0.01, (traces, 1, 1))
        shape = (traces, 1, 2, BINS)
        ours = 0.5 + level[..., None] + rng.normal(0.0, 0.1, shape)
        made = Samples(
            ours=ours,
            theirs=np.full(shape, 0.5),
            bottom=np.ones(shape),
            families=[""] * traces,
        )
        low, high = gain(made).ci95
        covered += low <= truth <= high
    assert covered >= 34


def test_runs_without_the_metric_are_left_out() -> None:
    made = samples(np.full((3, 1, 1), 0.02), families=[""] * 3)
    bottom = made.bottom.copy()
    bottom[1] = 0.0
    ours = np.where(bottom > 0, made.ours, 0.0)
    theirs = np.where(bottom > 0, made.theirs, 0.0)
    found = gain(Samples(ours=ours, theirs=theirs, bottom=bottom, families=made.families))
    assert found.mean == pytest.approx(0.02)
    assert np.isfinite(found.ci95).all()
    nothing = gain(
        Samples(ours=ours * 0, theirs=theirs * 0, bottom=bottom * 0, families=made.families)
    )
    assert np.isnan(nothing.mean)
    assert not nothing.shown


def test_it_gives_the_same_interval_again() -> None:
    made = samples(np.full((3, 1, 2), 0.02), noise=0.1, families=[""] * 3)
    assert gain(made) == gain(made)


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([5.0], 5.0),
        ([0.0, 1.0, 2.0, 100.0], 1.5),
        ([100.0, 0.0, 2.0, 1.0, np.nan], 1.5),
        # A quarter is one value and a half: the second and fifth count half.
        ([0.0, 1.0, 2.0, 3.0, 4.0, 100.0], (0.5 * 1 + 2 + 3 + 0.5 * 4) / 3),
    ],
)
def test_the_interquartile_mean_leaves_out_the_outer_quarters(
    values: list[float], mean: float
) -> None:
    assert iqm(np.array(values)) == pytest.approx(mean)
