"""Spans of time: their union, and how much of other spans it covers. It knows no requests."""

from __future__ import annotations

import numpy as np

from trimtab.training.diagnosis.observed import FloatArray


class Cover:
    """The union of spans."""

    def __init__(self, starts: FloatArray, ends: FloatArray) -> None:
        """Merge the spans [starts, ends), shape (n,) each; backward ones are left out."""
        kept = ends > starts
        order = np.argsort(starts[kept], kind="stable")
        first, last = starts[kept][order], np.maximum.accumulate(ends[kept][order])
        new = np.ones(len(first), np.bool_)
        new[1:] = first[1:] > last[:-1]
        at = np.flatnonzero(new)
        self._starts = first[at]
        self._ends = last[np.append(at[1:], len(last)) - 1] if len(at) else last
        self._before = np.concatenate(([0.0], np.cumsum(self._ends - self._starts)))

    @property
    def length(self) -> float:
        """Length of the union."""
        return float(self._before[-1])

    def _until(self, times: FloatArray) -> FloatArray:
        """Length of the union before each time."""
        at = np.searchsorted(self._starts, times, side="right")
        whole = self._before[at]
        if not len(self._ends):
            return whole
        over = np.where(at > 0, self._ends[np.maximum(at - 1, 0)] - times, 0.0)
        return whole - np.maximum(over, 0.0)

    def of(self, starts: FloatArray, ends: FloatArray) -> FloatArray:
        """Length of the union inside each span, shape (n,)."""
        return self._until(ends) - self._until(starts)
