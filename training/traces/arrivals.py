"""Nonstationary arrival processes on a grid of seconds: day curve, MMPP, Gamma renewals, events.

Everything is vectorised and drawn from the generator it is given; it knows no tiers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

GRID_S: Final = 1.0
"""Step of the grid that rates are given on, seconds."""
_DAY_S = 86_400.0


def day_curve(span_s: float, amplitude_fraction: float, period_s: float = _DAY_S) -> FloatArray:
    """A day's rise and fall around 1, lowest at the start, shape (seconds of the span,)."""
    time_s = np.arange(0.0, span_s, GRID_S)
    return 1.0 - amplitude_fraction * np.cos(2.0 * np.pi * time_s / period_s)


def markov_bursts(
    span_s: float,
    rng: np.random.Generator,
    *,
    factor: float,
    calm_s: float,
    burst_s: float,
) -> FloatArray:
    """A two-state Markov-modulated factor with mean 1.

    Args:
        span_s: Span, seconds.
        rng: Draws the sojourns.
        factor: Rate in a burst over the rate in a calm.
        calm_s: Mean length of a calm, seconds.
        burst_s: Mean length of a burst, seconds.

    Returns:
        Factor of the rate, shape (seconds of the span,).
    """
    pairs = int(np.ceil(span_s / (calm_s + burst_s) * 1.5)) + 20
    sojourns = rng.exponential(np.tile([calm_s, burst_s], pairs))
    ends = np.cumsum(sojourns)
    state = np.searchsorted(ends, np.arange(0.0, span_s, GRID_S), side="right") % 2
    calm = (calm_s + burst_s) / (calm_s + factor * burst_s)
    return np.where(state == 1, factor * calm, calm)


def regimes(
    span_s: float, rng: np.random.Generator, *, levels: Sequence[float], mean_s: float
) -> FloatArray:
    """Piecewise constant factors, one of `levels` each, a new one about every `mean_s` seconds."""
    count = int(np.ceil(span_s / mean_s * 2.0)) + 20
    ends = np.cumsum(rng.uniform(0.5 * mean_s, 1.5 * mean_s, count))
    steps = rng.integers(1, len(levels), count) if len(levels) > 1 else np.zeros(count, np.int64)
    # Steps of at least one level: every change of regime is a change.
    chosen = np.asarray(levels)[(rng.integers(len(levels)) + np.cumsum(steps)) % len(levels)]
    return chosen[np.searchsorted(ends, np.arange(0.0, span_s, GRID_S), side="right")]


def pulse(span_s: float, start_s: float, length_s: float, height: float) -> FloatArray:
    """A factor of 1 that is `height` for a while."""
    time_s = np.arange(0.0, span_s, GRID_S)
    return np.where((time_s >= start_s) & (time_s < start_s + length_s), height, 1.0)


def renewals(rate_per_s: FloatArray, rng: np.random.Generator, *, cv: float = 1.0) -> FloatArray:
    """Draw arrivals whose rate follows a grid.

    Gamma gaps of mean 1 are laid along the integral of the rate, so that both the rate and the
    burstiness come out; cv 1 is a Poisson process.

    Args:
        rate_per_s: Rate in each second of the span, shape (s,).
        rng: Draws the gaps.
        cv: Coefficient of variation of the gaps.

    Returns:
        Arrival times, seconds, sorted.
    """
    integral = np.r_[0.0, np.cumsum(rate_per_s * GRID_S)]
    total = float(integral[-1])
    if total <= 0:
        return np.zeros(0)
    shape = 1.0 / cv**2
    count = int(total + 6.0 * cv * np.sqrt(total) + 20.0 * cv**2) + 20
    # The first gap is cut at a random point, or a bursty process would begin with a burst.
    marks = np.cumsum(rng.gamma(shape, 1.0 / shape, count))
    marks = marks - rng.random() * marks[0]
    marks = marks[marks < total]
    # The second in which the integral passes a mark; silent seconds are passed by none.
    second = np.minimum(np.searchsorted(integral, marks, side="right") - 1, len(rate_per_s) - 1)
    height = integral[second + 1] - integral[second]
    times: FloatArray = (second + np.clip((marks - integral[second]) / height, 0.0, 1.0)) * GRID_S
    return times
