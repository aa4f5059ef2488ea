"""Windows of traces, and what is drawn for an episode."""

from __future__ import annotations

import numpy as np
import pytest

from trimtab.engine_bridge.errors import TraceError
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.training.learning.scenarios import (
    Randomisation,
    ScenarioSource,
    Span,
    fixed_windows,
    split,
    whole,
    window,
)
from trimtab.training.traces.generate import generate


@pytest.fixture(scope="module")
def traffic() -> Trace:
    return generate(hours=0.2, seed=5, load=0.8)


def sessions(trace: Trace) -> dict[int, np.ndarray]:
    rows = np.flatnonzero(trace.session != NO_SESSION)
    return {int(s): rows[trace.session[rows] == s] for s in np.unique(trace.session[rows])}


def test_a_window_cuts_no_hole_into_a_session(traffic: Trace) -> None:
    part = window(traffic, start_s=200.0, length_s=150.0)
    part.check()
    inside = (traffic.arrival_s >= 200.0) & (traffic.arrival_s < 350.0)
    assert len(part) == inside.sum()
    assert part.arrival_s[0] >= 0
    assert part.arrival_s[-1] < 150.0
    joined = 0
    for session, rows in sessions(part).items():
        assert part.turn[rows].tolist() == list(range(len(rows)))
        assert part.think_s[rows[0]] == 0.0
        first = np.flatnonzero((traffic.session == session) & inside)[0]
        joined += traffic.turn[first] > 0
        np.testing.assert_array_equal(
            part.think_s[rows[1:]],
            traffic.think_s[np.flatnonzero((traffic.session == session) & inside)[1:]],
        )
    assert joined > 0, "the trace has no session under way at 200 s: it tests nothing"


def test_a_window_keeps_the_prefixes(traffic: Trace) -> None:
    part = window(traffic, start_s=200.0, length_s=150.0)
    row = int(np.searchsorted(traffic.arrival_s, 200.0))
    begin, end = traffic.prefix_offsets[row : row + 2]
    np.testing.assert_array_equal(
        part.prefix_ids[: part.prefix_offsets[1]], traffic.prefix_ids[begin:end]
    )


def test_training_and_validation_share_no_request(traffic: Trace) -> None:
    (training,), (validation,) = split([traffic], hold_back=True)
    first = window(traffic, start_s=training.start_s, length_s=training.end_s - training.start_s)
    last = window(
        traffic, start_s=validation.start_s, length_s=validation.end_s - validation.start_s
    )
    assert len(first) + len(last) == len(traffic)
    assert validation.start_s == training.end_s


def test_without_holding_back_all_is_for_training(traffic: Trace) -> None:
    training, validation = split([traffic], hold_back=False)
    (span,) = training
    assert validation == []
    assert len(window(traffic, start_s=span.start_s, length_s=span.end_s)) == len(traffic)


def test_fixed_windows_do_not_overlap_and_are_spread(traffic: Trace) -> None:
    windows = fixed_windows(whole([traffic]), length_s=60.0, most=4)
    assert len(windows) == 4
    assert all(part.duration_s < 60.0 for part in windows)
    everything = fixed_windows(whole([traffic]), length_s=60.0, most=100)
    assert sum(map(len, everything)) <= len(traffic)


def test_a_trace_shorter_than_a_window_is_one_window(traffic: Trace) -> None:
    (only,) = fixed_windows(whole([traffic]), length_s=1e5, most=4)
    assert len(only) == len(traffic)


def test_equal_generators_draw_equal_scenarios(traffic: Trace) -> None:
    source = ScenarioSource(
        whole([traffic]), length_s=100.0, randomisation=Randomisation(speed_fraction=0.25)
    )
    first, again, other = (source.draw(np.random.default_rng(n)) for n in (1, 1, 2))
    assert (first.trace.digest(), first.speed, first.seed) == (
        again.trace.digest(), again.speed, again.seed,
    )  # fmt: skip
    assert first.trace.digest() != other.trace.digest()


def test_speeds_stay_inside_their_spread_and_vary(traffic: Trace) -> None:
    source = ScenarioSource(
        whole([traffic]), length_s=50.0, randomisation=Randomisation(speed_fraction=0.25)
    )
    rng = np.random.default_rng(0)
    speeds = [source.draw(rng).speed for _ in range(40)]
    assert min(speeds) >= 0.75
    assert max(speeds) <= 1.25
    assert max(speeds) - min(speeds) > 0.3


def test_a_drawn_window_is_never_empty() -> None:
    silent = Trace.build(
        arrival_s=[0.0, 1.0, 990.0], prompt_tokens=[10, 10, 10], output_tokens=[1, 1, 1]
    )
    source = ScenarioSource(whole([silent]), length_s=20.0, randomisation=Randomisation())
    rng = np.random.default_rng(0)
    assert all(len(source.draw(rng).trace) for _ in range(50))


def test_stretches_without_a_request_are_refused(traffic: Trace) -> None:
    empty = Span(trace=traffic, start_s=1e6, end_s=2e6)
    with pytest.raises(TraceError, match="at least one request"):
        ScenarioSource([empty], length_s=10.0, randomisation=Randomisation())
