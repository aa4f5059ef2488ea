"""The grid of a loop's ticks: late once, never in a hurry to make up."""

from __future__ import annotations

from trimtab.controller.daemon.pace import Pace, awake_clock_s


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.waits: list[float] = []
        self.slow_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s

    def wait(self, length_s: float) -> None:
        self.waits.append(length_s)
        self.now_s += length_s + self.slow_s


def ticks(pace: Pace, clock: Clock, lengths_s: list[float]) -> list[float]:
    """When each tick began, for ticks of these lengths."""
    began = []
    for length_s in lengths_s:
        pace.wait_for_tick()
        began.append(clock.now_s)
        clock.now_s += length_s
    return began


def test_ticks_begin_on_the_grid_however_long_they_take() -> None:
    clock = Clock()
    pace = Pace(2.0, monotonic_s=clock.monotonic_s, wait=clock.wait, phase_s=0.5)
    assert ticks(pace, clock, [0.1, 1.9, 0.0, 0.3]) == [100.5, 102.5, 104.5, 106.5]
    assert pace.late == 0


def test_a_tick_that_takes_too_long_leaves_ticks_out_and_the_grid_stays() -> None:
    clock = Clock()
    pace = Pace(2.0, monotonic_s=clock.monotonic_s, wait=clock.wait)
    # The second one was due at 102 and began at 104.5, as the one that was due at 104.
    assert ticks(pace, clock, [4.5, 0.1, 0.1]) == [100.0, 104.5, 106.0]
    assert pace.late == 1


def test_a_process_that_was_stopped_for_a_minute_ticks_once_for_it() -> None:
    clock = Clock()
    pace = Pace(2.0, monotonic_s=clock.monotonic_s, wait=clock.wait)
    assert ticks(pace, clock, [0.1, 60.0, 0.1, 0.1]) == [100.0, 102.0, 162.0, 164.0]
    assert pace.late == 29


def test_a_tick_that_begins_late_by_more_than_half_an_interval_counts() -> None:
    clock = Clock()
    pace = Pace(2.0, monotonic_s=clock.monotonic_s, wait=clock.wait)
    ticks(pace, clock, [0.1])
    clock.slow_s = 1.1
    ticks(pace, clock, [0.0])
    assert pace.late == 1
    clock.slow_s = 0.9
    ticks(pace, clock, [0.0])
    assert pace.late == 1


def test_a_wait_that_ends_early_as_the_loop_is_to_end_is_no_fault() -> None:
    clock = Clock()
    pace = Pace(2.0, monotonic_s=clock.monotonic_s, wait=lambda length_s: None, phase_s=1.0)
    pace.wait_for_tick()
    assert clock.now_s == 100.0
    assert pace.late == 0


def test_the_clock_of_leases_never_goes_back() -> None:
    readings = [awake_clock_s() for _ in range(100)]
    assert readings == sorted(readings)
