"""Intervals of a gain over several traces: traces, variations and stretches of time are drawn.

The stratified bootstrap of Agarwal et al. (2021, arXiv 2108.13264) for paired runs. A resample
draws traces inside their family, variations of each drawn trace (apart for each speed of the
engine), and inside each drawn run stretches of time (`whatif.statistics`), the same for both sides
of a pair. Drawing at every level overstates the spread somewhat: the intervals err on the wide
side. With one trace in a family the family's traces are not drawn, and an interval then speaks of
that trace only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.training.whatif.statistics import BINS, draw_bin_counts

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

RESAMPLES = 2000
_STRETCH_DRAWS = 400
"""Draws of stretches inside one run; a resample takes one of them."""
_SEED = 20_211


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A mean paired difference and how sure it is, in the unit of the metric."""

    mean: float
    """Mean over traces, speeds and variations."""
    ci95: tuple[float, float]
    """95 % interval of the mean."""
    iqm: float
    """Mean of the middle half of the runs' differences: what a typical run gains."""
    iqm_ci95: tuple[float, float]
    """95 % interval of that."""
    improvement: float
    """Probability of improvement: share of the paired runs that gain, ties counting half."""

    @property
    def shown(self) -> bool:
        """Whether the interval of the mean lies above zero."""
        return self.ci95[0] > 0


@dataclass(frozen=True, kw_only=True)
class Samples:
    """A metric of both sides as sum(top) / sum(bottom) over time bins.

    Shapes (traces, speeds, seeds, BINS); the bottom is the same for both sides.
    """

    ours: FloatArray
    theirs: FloatArray
    bottom: FloatArray
    families: Sequence[str]
    """Family of each trace."""

    def differences(self) -> FloatArray:
        """Ours minus theirs of each run, shape (traces, speeds, seeds); NaN where bottom is 0."""
        return _ratio((self.ours - self.theirs).sum(axis=-1), self.bottom.sum(axis=-1))


def gain(samples: Samples) -> Gain:
    """The gain of `ours` over `theirs`; all NaN where no run has the metric."""
    single = samples.differences()
    known = single[np.isfinite(single)]
    if not known.size:
        nan = float("nan")
        return Gain(mean=nan, ci95=(nan, nan), iqm=nan, iqm_ci95=(nan, nan), improvement=nan)
    # A fixed generator: the same runs must give the same interval.
    rng = np.random.default_rng(_SEED)
    drawn = _draw_runs(_draw_stretches(samples, rng), samples.families, rng)
    flat = drawn.reshape(RESAMPLES, -1)
    low, high = np.nanquantile(_row_means(flat), [0.025, 0.975])
    iqm_low, iqm_high = np.nanquantile([iqm(row) for row in flat], [0.025, 0.975])
    return Gain(
        mean=float(known.mean()),
        ci95=(float(low), float(high)),
        iqm=iqm(single),
        iqm_ci95=(float(iqm_low), float(iqm_high)),
        improvement=float(np.mean((known > 0) + 0.5 * (known == 0))),
    )


def iqm(values: FloatArray) -> float:
    """Interquartile mean of the finite values: the lowest and highest quarter are left out.

    Where a quarter is no whole number of values, those at its edge count in part. NaN without any.
    """
    known = np.sort(values[np.isfinite(values)], axis=None)
    if not known.size:
        return float("nan")
    edges = np.arange(known.size + 1, dtype=np.float64)
    low, high = known.size / 4, known.size * 3 / 4
    weight = np.clip(np.minimum(edges[1:], high) - np.maximum(edges[:-1], low), 0.0, None)
    return float(known @ weight / weight.sum())


def _draw_stretches(samples: Samples, rng: np.random.Generator) -> FloatArray:
    """Differences of each run under drawn stretches, shape (traces, speeds, seeds, draws)."""
    shape = samples.bottom.shape[:-1]
    drawn = np.empty((*shape, _STRETCH_DRAWS))
    for run in np.ndindex(*shape):
        counts = draw_bin_counts(1, _STRETCH_DRAWS, rng).reshape(_STRETCH_DRAWS, BINS)
        top = counts @ (samples.ours[run] - samples.theirs[run])
        drawn[run] = _ratio(top, counts @ samples.bottom[run])
    return drawn


def _draw_runs(
    differences: FloatArray, families: Sequence[str], rng: np.random.Generator
) -> FloatArray:
    """Whole resamples, shape (RESAMPLES, traces, speeds, seeds)."""
    traces, speeds, seeds, draws = differences.shape
    shape = (RESAMPLES, traces, speeds, seeds)
    trace = _draw_traces(families, rng)[:, :, None, None]
    speed = np.arange(speeds)[None, None, :, None]
    seed = rng.integers(0, seeds, shape)
    return differences[trace, speed, seed, rng.integers(0, draws, shape)]


def _draw_traces(families: Sequence[str], rng: np.random.Generator) -> IntArray:
    """For each place a trace of its family, shape (RESAMPLES, traces)."""
    drawn = np.empty((RESAMPLES, len(families)), np.int64)
    names = np.array(families)
    for family in dict.fromkeys(families):
        members = np.flatnonzero(names == family)
        drawn[:, members] = rng.choice(members, (RESAMPLES, len(members)))
    return drawn


def _row_means(rows: FloatArray) -> FloatArray:
    known = np.isfinite(rows)
    return _ratio(np.where(known, rows, 0.0).sum(axis=1), known.sum(axis=1))


def _ratio(top: FloatArray, bottom: npt.NDArray[np.generic]) -> FloatArray:
    empty = bottom == 0
    return np.where(empty, np.nan, top / np.where(empty, 1, bottom))
