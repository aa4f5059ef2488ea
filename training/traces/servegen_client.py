"""One ServeGen client: its windows, and the length tables that its requests are drawn from.

The tables are printed Python dicts; they are parsed as data and never evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError
from trimtab.training.traces.source import JsonObject
from trimtab.training.traces.table import MOST_TOKENS

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

_LONGEST_LITERAL = 8_000_000
_LITERAL = re.compile(r"\s*\{[0-9eE.+\-:,\s]*\}\s*")


@dataclass(frozen=True)
class Client:
    """One client's windows and length tables."""

    name: str
    start_s: FloatArray
    """Start of each window, seconds, shape (w,)."""
    rate_per_s: FloatArray
    """Mean rate of each window, shape (w,)."""
    weibull: npt.NDArray[np.bool_]
    """Whether inter-arrivals follow a Weibull (else Gamma) distribution, shape (w,)."""
    shape: FloatArray
    """Shape of that distribution, 1 (a Poisson process) where it is not known, shape (w,)."""
    lengths: Mapping[float, JsonObject]
    """Length tables by window start; parsed when they are needed."""
    file: str

    @property
    def shows_media(self) -> bool:
        """Whether its requests hold images, audio or videos beside their text."""
        return any("text_tokens" in window for window in self.lengths.values())

    @property
    def window_s(self) -> float:
        """Length of a window, seconds."""
        return float(self.start_s[1] - self.start_s[0]) if len(self.start_s) > 1 else 600.0


def length_table(text: object, where: str, *, least: int = 1) -> tuple[LongArray, FloatArray]:
    """Parse a printed dict of token count to probability; never evaluates it.

    Only digits, signs, points, exponents, colons and commas inside one pair of braces are let
    through to `ast.literal_eval`, so that nothing nested or named can reach it.

    Returns:
        Token counts (at least `least`) and cumulative probabilities, both empty for `{}`.

    Raises:
        TraceError: it is something else.
    """
    fault = TraceError(
        where,
        value=text[:60] if isinstance(text, str) else type(text).__name__,
        bound="a dict of token count to probability",
    )
    if not isinstance(text, str) or len(text) > _LONGEST_LITERAL or not _LITERAL.fullmatch(text):
        raise fault
    try:
        table = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as cause:
        raise fault from cause
    if not isinstance(table, dict):
        raise fault
    for key, value in table.items():
        numbers = all(isinstance(item, int | float) for item in (key, value))
        if not numbers or not 0 <= key <= MOST_TOKENS or not 0 <= value < 1e300:
            raise fault
    counts = np.array([max(least, int(key)) for key in table], np.int64)
    weights = np.array(list(table.values()), np.float64)
    total = float(weights.sum())
    if not table or total <= 0:
        return np.zeros(0, np.int64), np.zeros(0)
    return counts, np.cumsum(weights) / total


def windows_of(client: Client, times_s: FloatArray) -> tuple[FloatArray, LongArray]:
    """Starts of the windows with length tables, and which one holds at each time."""
    starts = np.array(sorted(client.lengths))
    window = np.clip(np.searchsorted(starts, times_s, side="right") - 1, 0, len(starts) - 1)
    return starts, window


def picked(table: tuple[LongArray, FloatArray], count: int, rng: np.random.Generator) -> LongArray:
    """Draw so many values of a table, shape (count,)."""
    counts, cumulative = table
    picks = np.searchsorted(cumulative, rng.random(count), side="right")
    return counts[np.minimum(picks, len(counts) - 1)]


def nearest_table(
    client: Client, starts: FloatArray, number: int, key: str, *, least: int = 1
) -> tuple[LongArray, FloatArray]:
    """The length table of a window, or of the nearest one in time that knows any lengths.

    Raises:
        TraceError: no window knows any.
    """
    for other in np.argsort(np.abs(starts - starts[number]), kind="stable"):
        start = float(starts[other])
        where = f"{client.file} window {start:g}: {key}"
        text = client.lengths[start].get(key, "{}")
        counts, cumulative = length_table(text, where, least=least)
        if len(counts):
            return counts, cumulative
    raise TraceError(client.file, key=key, remedy="no window holds any lengths")
