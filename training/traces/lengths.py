"""The distribution that synthetic lengths and pauses follow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Lognormal:
    """A log-normal length or pause, cut at both ends."""

    median: float
    sigma: float
    low: float
    high: float

    def draw(self, count: int, rng: np.random.Generator) -> FloatArray:
        """Draw values, shape (count,)."""
        values = self.median * np.exp(self.sigma * rng.standard_normal(count))
        return np.clip(values, self.low, self.high)

    def tokens(self, count: int, rng: np.random.Generator) -> LongArray:
        """Draw whole numbers, shape (count,)."""
        return np.rint(self.draw(count, rng)).astype(np.int64)
