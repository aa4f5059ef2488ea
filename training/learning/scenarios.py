"""Scenarios: what an episode plays, drawn anew for each one from windows of traces.

A window never breaks a session: one that is under way joins in its middle and ends with the
window, without a hole. It replays nothing and knows no environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.training.whatif.variation import session_rows, vary

VALIDATION_FRACTION = 0.2
"""Last part of each training trace that is kept for validation where no other trace is given."""
_MOST_VARIATIONS = 2**31 - 1
_TRIES = 64


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a trace, [start_s, end_s) seconds, from which windows may be cut."""

    trace: Trace
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Randomisation:
    """How far an episode may stray from the recorded traffic and the calibrated engine."""

    speed_fraction: float = 0.25
    """The engine's step time is scaled by a factor drawn from 1 -/+ this."""
    late_probability: float = 0.03
    """Chance that an interval's telemetry has not come when the policy acts: it then sees the last
    one that has, which grows older while this goes on."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What one episode plays."""

    trace: Trace
    speed: float
    """True step time over the model's."""
    seed: int
    """Of whatever the environment itself draws."""


class ScenarioSource:
    """Draws scenarios: a window of some trace, a variation of its traffic, an engine's speed.

    Equal generators draw equal scenarios.
    """

    def __init__(
        self, spans: Sequence[Span], *, length_s: float, randomisation: Randomisation
    ) -> None:
        """Take the stretches to cut from; each counts by its length.

        Raises:
            TraceError: no stretch holds a request.
        """
        self._spans = [span for span in spans if _requests(span, span.start_s, span.end_s)]
        if not self._spans:
            raise TraceError("training traces", value="0 requests", bound="at least one request")
        lengths_s = np.array([span.end_s - span.start_s for span in self._spans])
        self._chances = lengths_s / lengths_s.sum()
        self._length_s = length_s
        self._randomisation = randomisation

    def draw(self, rng: np.random.Generator) -> Scenario:
        """The next scenario."""
        span, start_s, length_s = self._place(rng)
        spread = self._randomisation.speed_fraction
        part = window(span.trace, start_s=start_s, length_s=length_s)
        return Scenario(
            trace=vary(part, int(rng.integers(1, _MOST_VARIATIONS))),
            speed=float(rng.uniform(1 - spread, 1 + spread)),
            seed=int(rng.integers(_MOST_VARIATIONS)),
        )

    def _place(self, rng: np.random.Generator) -> tuple[Span, float, float]:
        # Recorded traffic can be silent for minutes: an empty window would teach nothing.
        for _ in range(_TRIES):
            span = self._spans[int(rng.choice(len(self._spans), p=self._chances))]
            length_s = min(self._length_s, span.end_s - span.start_s)
            start_s = float(rng.uniform(span.start_s, span.end_s - length_s))
            if _requests(span, start_s, start_s + length_s):
                return span, start_s, length_s
        return span, span.start_s, span.end_s - span.start_s


def split(traces: Sequence[Trace], *, hold_back: bool) -> tuple[list[Span], list[Span]]:
    """Training and validation stretches: each trace's last fifth validates if `hold_back`."""
    training, validation = [], []
    for trace in traces:
        # The last request arrives at duration_s and must lie inside.
        end_s = float(np.nextafter(trace.duration_s, np.inf))
        border_s = end_s * (1 - VALIDATION_FRACTION) if hold_back else end_s
        training.append(Span(trace=trace, start_s=0.0, end_s=border_s))
        if hold_back:
            validation.append(Span(trace=trace, start_s=border_s, end_s=end_s))
    return training, validation


def whole(traces: Sequence[Trace]) -> list[Span]:
    """Each trace as one stretch."""
    return split(traces, hold_back=False)[0]


def fixed_windows(spans: Sequence[Span], *, length_s: float, most: int) -> list[Trace]:
    """At most `most` windows that do not overlap, spread evenly over the stretches.

    A stretch shorter than `length_s` is one window. Windows without a request are left out.
    """
    found = []
    for span in spans:
        count = max(1, int((span.end_s - span.start_s) / length_s))
        each_s = min(length_s, span.end_s - span.start_s)
        for place in range(count):
            start_s = span.start_s + place * each_s
            if _requests(span, start_s, start_s + each_s):
                found.append((span.trace, start_s, each_s))
    chosen = np.unique(np.linspace(0, len(found) - 1, min(most, len(found))).round().astype(int))
    return [
        window(trace, start_s=start_s, length_s=each_s)
        for trace, start_s, each_s in (found[n] for n in chosen)
    ]


def window(trace: Trace, *, start_s: float, length_s: float) -> Trace:
    """The requests that were recorded from `start_s` on for `length_s`, seconds from its start.

    The first turn of a session inside it becomes turn 0 and arrives when it was recorded.
    """
    low, high = np.searchsorted(trace.arrival_s, [start_s, start_s + length_s])
    part = trace.take(np.arange(low, high))
    first = session_rows(part)
    opens = (part.session != NO_SESSION) & (first == np.arange(len(part)))
    return replace(
        part,
        arrival_s=part.arrival_s - start_s,
        turn=np.where(part.session == NO_SESSION, part.turn, part.turn - part.turn[first]),
        think_s=np.where(opens, 0.0, part.think_s),
    )


def _requests(span: Span, start_s: float, end_s: float) -> int:
    low, high = np.searchsorted(span.trace.arrival_s, [start_s, end_s])
    return int(high - low)
