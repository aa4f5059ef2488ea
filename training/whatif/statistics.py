"""Confidence intervals for paired runs: a moving-block bootstrap over time, and over seeds.

Requests of one minute share its weather, so single requests are no independent samples. Time is cut
into bins; stretches of consecutive bins are drawn with replacement, the same ones for both runs
of a pair. With several seeds the seeds are drawn first, then stretches inside each. Nothing here
knows what the figures mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BINS = 120
"""Time bins of a trace."""
STRETCH_BINS = 6
"""Bins drawn together: one twentieth of the trace, longer than a queue usually remembers."""
RESAMPLES = 2000
QUANTILE_RESAMPLES = 400
"""Fewer for quantiles, which cost more."""
_BUCKET_RANKS = np.concatenate([np.linspace(0, 0.9, 600), np.linspace(0.9, 1, 1401)[1:]])


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean difference and its 95 % bootstrap interval, in the unit of the metric."""

    mean: float
    low: float
    high: float

    @property
    def settled(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class RatioSample:
    """One run's metric as sum(numerator) / sum(denominator) over time bins, shape (bins,)."""

    numerator: FloatArray
    denominator: FloatArray


@dataclass(frozen=True, kw_only=True)
class ValueSample:
    """One run's metric as a quantile of single values, each in a time bin; NaN values left out."""

    values: FloatArray
    bins: IntArray


def time_bins(start_s: FloatArray, duration_s: float) -> IntArray:
    """The bin of each start time, shape (n,), 0 to BINS - 1."""
    width_s = max(duration_s, 1e-9) / BINS
    return np.clip((start_s / width_s).astype(np.int64), 0, BINS - 1)


def draw_bin_counts(seeds: int, resamples: int, rng: np.random.Generator) -> IntArray:
    """How often each bin of each seed is drawn, shape (resamples, seeds, BINS).

    Stretches wrap around the end of the trace, so that every bin is as likely as any other.
    """
    stretches = -(-BINS // STRETCH_BINS)
    if seeds > 1:
        chosen = rng.integers(0, seeds, size=(resamples, seeds))
    else:
        chosen = np.zeros((resamples, 1), np.int64)
    starts = rng.integers(0, BINS, size=(resamples, seeds, stretches))
    drawn = (starts[..., None] + np.arange(STRETCH_BINS)) % BINS
    place = (np.arange(resamples)[:, None, None, None] * seeds + chosen[:, :, None, None]) * BINS
    flat = np.bincount((place + drawn).ravel(), minlength=resamples * seeds * BINS)
    return flat.reshape(resamples, seeds, BINS)


def ratio_difference(
    pairs: Sequence[tuple[RatioSample, RatioSample]], *, rng: np.random.Generator
) -> Interval:
    """Mean over seeds of (first - second) with its interval; one pair a seed.

    The ratios of each resample are of its pooled sums, so an empty bin weighs nothing.
    """
    counts = draw_bin_counts(len(pairs), RESAMPLES, rng).reshape(RESAMPLES, -1)

    def resampled(side: int) -> FloatArray:
        top = np.concatenate([pair[side].numerator for pair in pairs])
        bottom = np.concatenate([pair[side].denominator for pair in pairs])
        return _divide(counts @ top, counts @ bottom)

    means = [
        _ratio(first.numerator, first.denominator) - _ratio(second.numerator, second.denominator)
        for first, second in pairs
    ]
    return _interval(means, resampled(0) - resampled(1))


def quantile_difference(
    pairs: Sequence[tuple[ValueSample, ValueSample]], *, q: float, rng: np.random.Generator
) -> Interval:
    """Mean over seeds of the difference of two q-quantiles (first - second), with its interval."""
    counts = draw_bin_counts(len(pairs), QUANTILE_RESAMPLES, rng)
    means = [_quantile(first.values, q) - _quantile(second.values, q) for first, second in pairs]
    resampled = np.stack(
        [
            _drawn_quantiles(first, counts[:, seed], q)
            - _drawn_quantiles(second, counts[:, seed], q)
            for seed, (first, second) in enumerate(pairs)
        ],
        axis=1,
    )
    drawn_weight = counts.sum(axis=2) * ~np.isnan(resampled)
    filled = np.where(np.isnan(resampled), 0.0, resampled)
    return _interval(means, _divide((filled * drawn_weight).sum(1), drawn_weight.sum(1)))


def _drawn_quantiles(sample: ValueSample, counts: IntArray, q: float) -> FloatArray:
    """The q-quantile under each row of bin counts; NaN where no value was drawn, shape (rows,).

    Many values are put into buckets first, fine ones in the upper tail: a quantile is then the
    upper edge of its bucket.
    """
    known = ~np.isnan(sample.values)
    values, bins = sample.values[known], sample.bins[known]
    if not len(values):
        return np.full(len(counts), np.nan)
    edges = np.unique(values)
    if len(edges) > len(_BUCKET_RANKS):
        edges = np.unique(np.quantile(values, _BUCKET_RANKS, method="inverted_cdf"))
    bucket = np.searchsorted(edges, values)
    cells = np.bincount(bins * len(edges) + bucket, minlength=BINS * len(edges))
    below = np.cumsum(counts @ cells.reshape(BINS, len(edges)).astype(np.float64), axis=1)
    at = np.sum(below < q * below[:, -1:], axis=1)
    return np.where(below[:, -1] > 0, edges[np.minimum(at, len(edges) - 1)], np.nan)


def _quantile(values: FloatArray, q: float) -> float:
    known = values[~np.isnan(values)]
    return float(np.quantile(known, q)) if len(known) else float("nan")


def _ratio(numerator: FloatArray, denominator: FloatArray) -> float:
    total = float(denominator.sum())
    return float(numerator.sum()) / total if total else float("nan")


def _divide(top: FloatArray, bottom: npt.NDArray[np.generic]) -> FloatArray:
    empty = bottom == 0
    return np.where(empty, np.nan, top / np.where(empty, 1, bottom))


def _interval(means: Sequence[float], resampled: FloatArray) -> Interval:
    known_means = [mean for mean in means if not np.isnan(mean)]
    known = resampled[~np.isnan(resampled)]
    if not known_means or not len(known):
        return Interval(mean=float("nan"), low=float("nan"), high=float("nan"))
    low, high = np.quantile(known, [0.025, 0.975])
    return Interval(mean=float(np.mean(known_means)), low=float(low), high=float(high))
