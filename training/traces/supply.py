"""More or less of a trace without stretching its time: thinning, shifted copies, more sessions.

Rates are scaled by leaving out or adding whole requests and sessions. Stretching time instead would
turn a burst of one second into one of three and make think times and silent minutes longer, so that
a scaled trace would ask for another scheduler than the recorded one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.merge import copies, starts_of, units_of

FloatArray = npt.NDArray[np.float64]
LongArray = npt.NDArray[np.int64]

JOIN_S: Final = 300.0
"""Sessions that run already at the start join over this long, seconds (a quarter of the whole at
most): all at once would be a storm of cold contexts that nobody recorded."""
_LEAST_SLOTS = 1e-3
_LADDER = 1.25
_MOST_LAPS = 10_000

Redraw = Callable[[float, float], Trace]
"""(factor of the rate, span in seconds) to a freshly drawn trace; equal arguments, equal traces."""


class Supply(ABC):
    """A source of traffic at any rate; more of it always contains most of less of it."""

    name: str

    @abstractmethod
    def take(self, factor: float) -> Trace:
        """The trace at `factor` times its own rate, inside the composed span."""


class ShiftedCopies(Supply):
    """Recorded traffic: thinned below its own rate, superposed above it.

    Copy 0 keeps its times. Each further copy is turned by a random shift around the trace's own
    span, so that its bursts fall elsewhere, and has sessions and prefix blocks of its own. Where
    the composed span is longer than the recorded one, the record repeats.
    """

    def __init__(
        self, name: str, trace: Trace, *, duration_s: float, offset_s: float, seed: int
    ) -> None:
        """Prepare a trace.

        Args:
            name: For errors.
            trace: Recorded traffic.
            duration_s: Composed span, seconds.
            offset_s: When this traffic begins in it, seconds.
            seed: Of the shifts and of who is left out.
        """
        self.name = name
        self._trace, self._seed = trace, seed
        self._duration_s, self._offset_s = duration_s, offset_s
        self._unit = units_of(trace)
        self._starts = starts_of(trace, self._unit)
        self._after_start = trace.arrival_s - self._starts[self._unit]
        span = float(self._starts.max() - self._starts.min())
        self._starts = self._starts - self._starts.min()
        # One mean gap more than the span, so that first and last request are no neighbours.
        self._period_s = span * (1.0 + 1.0 / max(len(self._starts) - 1, 1))
        window = duration_s - offset_s
        self._laps = max(1, int(np.ceil(window / self._period_s))) if span > 0 else 1
        if self._laps > _MOST_LAPS:
            raise TraceError(
                name,
                value=f"a record of {span:g} s",
                bound=f"at least {window / _MOST_LAPS:g} s for a trace of {window:g} s",
                remedy="choose a shorter --duration-s",
            )

    def take(self, factor: float) -> Trace:
        """See `Supply.take`."""
        whole = int(factor)
        pieces = [self._copy(number, 1.0) for number in range(whole)]
        if factor > whole or not pieces:
            pieces.append(self._copy(whole, factor - whole))
        rows, arrival, generation = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return copies(self._trace, rows, arrival_s=arrival, generation=generation, where=self.name)

    def _copy(self, number: int, fraction: float) -> tuple[LongArray, FloatArray, LongArray]:
        rng = np.random.default_rng([self._seed, number])
        shift = rng.random() * self._period_s if number else 0.0
        kept = rng.random(len(self._starts)) < fraction
        rows = np.flatnonzero(kept[self._unit])
        turned = self._starts + shift
        if self._period_s > 0:
            turned = turned % self._period_s
        first = (turned[self._unit] + self._after_start)[rows] + self._offset_s
        all_rows = np.tile(rows, self._laps)
        lap = np.repeat(np.arange(self._laps), len(rows))
        arrival = np.tile(first, self._laps) + lap * self._period_s
        inside = arrival <= self._duration_s
        return all_rows[inside], arrival[inside], (number * self._laps + lap)[inside]


class DrawnSessions(Supply):
    """Sessions without absolute time: as many as asked for, with drawn starts.

    A session may have begun before the composed span: then it joins in its middle, so that as many
    sessions run at the beginning as at the end. The last session is cut to hit a load exactly.
    """

    def __init__(
        self, name: str, trace: Trace, *, duration_s: float, offset_s: float, seed: int
    ) -> None:
        """Prepare sessions; see `ShiftedCopies`."""
        self.name = name
        self._trace, self._seed = trace, seed
        self._duration_s, self._offset_s = duration_s, offset_s
        self._unit = units_of(trace)
        starts = starts_of(trace, self._unit)
        self._after_start = trace.arrival_s - starts[self._unit]
        self._rows = np.argsort(self._unit, kind="stable")
        self._bounds = np.searchsorted(self._unit[self._rows], np.arange(len(starts) + 1))

    def take(self, factor: float) -> Trace:
        """See `Supply.take`."""
        sessions = len(self._bounds) - 1
        slots = max(factor * sessions, _LEAST_SLOTS)
        rng = np.random.default_rng(self._seed)
        rows: list[LongArray] = []
        times: list[FloatArray] = []
        turns: list[LongArray] = []
        generation: list[LongArray] = []
        for slot in range(int(np.ceil(slots))):
            if slot % sessions == 0:
                order = rng.permutation(sessions)
            number = int(order[slot % sessions])
            picked = self._rows[self._bounds[number] : self._bounds[number + 1]]
            picked, arrival = self._place(picked, rng)
            keep = len(picked)
            if slot + 1 > slots:
                keep = int(np.ceil(keep * (slots - slot)))
            rows.append(picked[:keep])
            times.append(arrival[:keep])
            turns.append(np.arange(keep, dtype=np.int64))
            generation.append(np.full(keep, slot // sessions, np.int64))
        return self._build(
            np.concatenate(rows),
            np.concatenate(times),
            np.concatenate(turns),
            np.concatenate(generation),
        )

    def _place(self, rows: LongArray, rng: np.random.Generator) -> tuple[LongArray, FloatArray]:
        """Draw one session's start and drop what lies outside the span."""
        after = self._after_start[rows]
        window = self._duration_s - self._offset_s
        start = rng.uniform(-float(after[-1]), window)
        joins = rng.uniform(0.0, min(JOIN_S, window / 4))
        arrival = start + after
        running = arrival >= 0
        if start < 0 and running.any():
            arrival = arrival + max(0.0, joins - float(arrival[running][0]))
        inside = running & (arrival < window)
        return rows[inside], arrival[inside] + self._offset_s

    def _build(
        self, rows: LongArray, times: FloatArray, turns: LongArray, generation: LongArray
    ) -> Trace:
        return copies(
            _with_turns(self._trace, rows, turns, times),
            np.arange(len(rows)),
            arrival_s=times,
            generation=generation,
            where=self.name,
        )


def _with_turns(trace: Trace, rows: LongArray, turns: LongArray, times: FloatArray) -> Trace:
    picked = trace.take(rows)
    first = turns == 0
    return replace(
        picked,
        arrival_s=times,
        turn=turns.astype(np.int32),
        think_s=np.where(first, 0.0, picked.think_s),
    )


class Redrawn(Supply):
    """Traffic that is drawn from distributions: drawn anew at about the rate asked for.

    It is drawn at rates a quarter apart and thinned in between, so that a little more is the same
    traffic and a little more, not another one.
    """

    def __init__(
        self, name: str, redraw: Redraw, *, duration_s: float, offset_s: float, seed: int
    ) -> None:
        """Prepare a generator; see `ShiftedCopies`."""
        self.name = name
        self._redraw, self._seed = redraw, seed
        self._window_s, self._offset_s = duration_s - offset_s, offset_s
        self._drawn_factor = 0.0
        self._drawn: Trace | None = None

    def take(self, factor: float) -> Trace:
        """See `Supply.take`."""
        wanted = float(_LADDER ** np.ceil(np.log(max(factor, 1e-6)) / np.log(_LADDER) - 1e-9))
        if self._drawn is None or wanted != self._drawn_factor:
            self._drawn_factor = wanted
            self._drawn = self._redraw(wanted, self._window_s)
        drawn = self._drawn
        rng = np.random.default_rng(self._seed)
        kept = rng.random(len(drawn)) < factor / wanted
        rows = np.flatnonzero(kept)
        arrival = drawn.arrival_s[rows] + self._offset_s
        return replace(drawn.take(rows), arrival_s=arrival)
