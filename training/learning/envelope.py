"""The range that each observation took in training: counts by bin, merged over time and resumes.

Observations lie in [-1, 1] by construction, so that bins are fixed and nothing is sampled. What is
done outside the range is the guard's affair.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import numpy.typing as npt

BINS = 2000
LOW_QUANTILE, HIGH_QUANTILE = 0.001, 0.999
_WIDTH = 2.0 / BINS

Float32Array = npt.NDArray[np.float32]


class Envelope:
    """Counts of every observation's values."""

    def __init__(self, size: int) -> None:
        """Begin with no observation, each of `size` numbers."""
        self._counts = np.zeros((size, BINS), np.int64)
        self._first = np.arange(size, dtype=np.int64) * BINS

    @classmethod
    def of(cls, counts: npt.NDArray[np.int64]) -> Self:
        """Go on from `counts`, shape (size, BINS)."""
        envelope = cls(len(counts))
        envelope._counts += counts
        return envelope

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Observations by number and bin, shape (size, BINS)."""
        return self._counts

    def add(self, observations: Float32Array) -> None:
        """Count observations, shape (n, size), each number in [-1, 1]."""
        bins = ((observations + 1.0) / _WIDTH).astype(np.int64)
        np.clip(bins, 0, BINS - 1, out=bins)
        # Several rows may hit one bin, which fancy indexing would count once.
        np.add.at(self._counts.reshape(-1), bins + self._first, 1)

    def bounds(self) -> tuple[Float32Array, Float32Array]:
        """The 0.1 % and 99.9 % quantiles, each at the outer edge of its bin, shape (size,).

        Without any observation the whole range.
        """
        total = self._counts.sum(axis=1, keepdims=True)
        below = np.cumsum(self._counts, axis=1)
        # The first bin at which the share is reached; ranks count from 1.
        low = (below < np.maximum(1, np.ceil(LOW_QUANTILE * total))).sum(axis=1)
        high = (below < np.ceil(HIGH_QUANTILE * total)).sum(axis=1)
        known = total[:, 0] > 0
        lows = np.where(known, -1.0 + low * _WIDTH, -1.0)
        highs = np.where(known, -1.0 + (high + 1) * _WIDTH, 1.0)
        return lows.astype(np.float32), highs.astype(np.float32)
