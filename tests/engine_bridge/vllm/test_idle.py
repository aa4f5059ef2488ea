"""An engine at rest ends its intervals on the grid, and never beside its scheduler."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from trimtab.engine_bridge.vllm.idle import IdleIntervals

WAIT_S = 20.0
"""Longest wait for a thread that has something to do at once."""


class Grid:
    """An interval is due when a test says so."""

    def __init__(self) -> None:
        self.now_s = self.closes_s = 0.0
        self.ended: list[float] = []
        self.more = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.may_end.set()
        self.fails = False

    def end(self, now_s: float) -> None:
        self.ended.append(now_s)
        self.closes_s = now_s + 0.02
        self.more.release()
        assert self.may_end.wait(WAIT_S)
        if self.fails:
            raise RuntimeError("no telemetry")


@pytest.fixture
def grid() -> Grid:
    return Grid()


@pytest.fixture
def idle(grid: Grid) -> Iterator[IdleIntervals]:
    made = IdleIntervals(grid.end, closes_s=lambda: grid.closes_s, now_s=lambda: grid.now_s)
    yield made
    grid.may_end.set()
    made.close()


def test_an_engine_that_has_just_started_is_at_rest(grid: Grid, idle: IdleIntervals) -> None:
    grid.now_s = 7.0
    idle.start()
    assert grid.more.acquire(timeout=WAIT_S)
    assert grid.ended == [7.0]


def test_nothing_is_ended_for_a_scheduler_at_work(grid: Grid, idle: IdleIntervals) -> None:
    idle.start()
    assert grid.more.acquire(timeout=WAIT_S)
    idle.wake()
    grid.closes_s = 0.0
    assert not grid.more.acquire(timeout=0.2)
    idle.rest()
    assert grid.more.acquire(timeout=WAIT_S)


def test_the_scheduler_waits_for_an_interval_that_is_being_ended(
    grid: Grid, idle: IdleIntervals
) -> None:
    grid.may_end.clear()
    idle.start()
    assert grid.more.acquire(timeout=WAIT_S)
    woken = threading.Event()
    thread = threading.Thread(target=lambda: (idle.wake(), woken.set()))
    thread.start()
    assert not woken.wait(0.1)
    grid.may_end.set()
    assert woken.wait(WAIT_S)
    thread.join(WAIT_S)


def test_a_failure_costs_the_telemetry_of_this_rest_alone(grid: Grid, idle: IdleIntervals) -> None:
    grid.fails = True
    idle.start()
    assert grid.more.acquire(timeout=WAIT_S)
    grid.fails, grid.closes_s = False, 0.0
    assert not grid.more.acquire(timeout=0.1)
    idle.wake()
    idle.rest()
    assert grid.more.acquire(timeout=WAIT_S)


def test_without_a_start_and_after_the_end_there_is_no_rest(
    grid: Grid, idle: IdleIntervals
) -> None:
    idle.rest()
    idle.wake()
    idle.start()
    assert grid.more.acquire(timeout=WAIT_S)
    idle.close()
    idle.rest()
    grid.closes_s = 0.0
    assert not grid.more.acquire(timeout=0.1)
