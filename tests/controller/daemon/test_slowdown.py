"""When a tier counts as slow: against its own last hour, for long enough, and told once."""

from __future__ import annotations

import random

import pytest

from tests.engine_bridge.vllm.sample_telemetry import telemetry, tier
from trimtab.controller.daemon.slowdown import Slowdown, SlowdownDetector
from trimtab.engine_bridge.plan import load_plan

PLAN = load_plan()
INTERVAL_S = 2.0


class Story:
    """A detector and a clock; each call tells it of some time of traffic."""

    def __init__(self) -> None:
        self.detector = SlowdownDetector(PLAN.tier_names, factor=3.0, for_s=30.0)
        self.now_s = 1_000.0
        self.found: list[tuple[float, Slowdown]] = []

    def intervals(self, seconds: float, **of_first_tier: float) -> Story:
        """So many seconds of intervals that are all alike; the other tiers are idle."""
        for _ in range(int(seconds / INTERVAL_S)):
            self.now_s += INTERVAL_S
            self.see(tier(**of_first_tier))
        return self

    def see(self, first: object) -> None:
        found = self.detector.see(telemetry(PLAN, first, time_s=self.now_s), self.now_s)  # type: ignore[arg-type]
        if found is not None:
            self.found.append((self.now_s, found))


def quick(minutes: float = 30.0) -> Story:
    """A story in which T0's P99 has been 200 ms."""
    return Story().intervals(60 * minutes, ttft_ms_p99=200.0)


def test_a_tier_is_slow_after_half_a_minute_above_three_times_its_baseline() -> None:
    story = quick()
    began_s = story.now_s
    story.intervals(120, ttft_ms_p99=900.0)
    ((at_s, found),) = story.found
    # The median of the last 10 s follows after some seconds.
    assert 30.0 <= at_s - began_s <= 42.0
    assert found.tier == "T0"
    assert (found.p99_ms, found.baseline_ms) == (900.0, 200.0)
    assert found.for_s == 30.0


@pytest.mark.parametrize("p99_ms", [200.0, 590.0])
def test_below_three_times_nothing_is_slow(p99_ms: float) -> None:
    assert quick().intervals(600, ttft_ms_p99=p99_ms).found == []


def test_what_lasts_less_than_half_a_minute_is_not_told() -> None:
    story = quick()
    for _ in range(10):
        story.intervals(24, ttft_ms_p99=2000.0).intervals(24, ttft_ms_p99=200.0)
    assert story.found == []


def test_single_bad_intervals_between_good_ones_are_not_a_slow_tier() -> None:
    story, draw = quick(), random.Random(3)
    for _ in range(900):
        story.intervals(2, ttft_ms_p99=3000.0 if draw.random() < 0.2 else 200.0)
    assert story.found == []


def test_single_good_intervals_do_not_hide_a_slow_tier() -> None:
    story = quick()
    for turn in range(60):
        story.intervals(2, ttft_ms_p99=3000.0 if turn % 3 else 200.0)
    assert len(story.found) == 1


def test_it_is_told_once_and_again_when_it_was_quick_in_between() -> None:
    story = quick().intervals(240, ttft_ms_p99=900.0)
    assert len(story.found) == 1
    story.intervals(60, ttft_ms_p99=200.0).intervals(60, ttft_ms_p99=900.0)
    assert len(story.found) == 2


def test_without_ten_minutes_of_baseline_nothing_is_slow() -> None:
    # Five minutes are left out.
    assert quick(13).intervals(60, ttft_ms_p99=9000.0).found == []
    assert len(quick(16).intervals(60, ttft_ms_p99=9000.0).found) == 1


def test_the_last_five_minutes_are_not_in_the_baseline() -> None:
    story = quick(20).intervals(240, ttft_ms_p99=550.0).intervals(60, ttft_ms_p99=700.0)
    assert story.found[0][1].baseline_ms == 200.0


def test_bad_minutes_in_the_hour_do_not_raise_the_baseline() -> None:
    story = quick(30).intervals(600, ttft_ms_p99=5000.0).intervals(600, ttft_ms_p99=200.0)
    story.found.clear()
    story.intervals(60, ttft_ms_p99=700.0)
    assert story.found[0][1].baseline_ms == 200.0


def test_what_lasts_for_an_hour_is_the_new_normal() -> None:
    story = quick(180).intervals(4200, ttft_ms_p99=900.0)
    story.intervals(60, ttft_ms_p99=200.0).found.clear()
    assert story.intervals(60, ttft_ms_p99=900.0).found == []
    assert len(story.intervals(60, ttft_ms_p99=3000.0).found) == 1


def test_a_stall_in_which_nobody_gets_a_first_token_is_slow() -> None:
    story = quick()
    for second in range(0, 60, 2):
        story.intervals(2, queue_length=9, oldest_wait_s=float(second))
    assert story.found[0][1].p99_ms > 600.0


def test_one_request_that_waits_beside_quick_ones_is_no_slow_tier() -> None:
    story = quick()
    for second in range(0, 120, 2):
        story.intervals(2, ttft_ms_p99=200.0, queue_length=1, oldest_wait_s=float(second))
    assert story.found == []


def test_an_idle_tier_is_neither_slow_nor_a_baseline() -> None:
    story = Story().intervals(3600)
    assert story.intervals(600, ttft_ms_p99=900.0).found == []


def test_the_same_interval_again_says_nothing() -> None:
    story = quick()
    for _ in range(40):
        story.now_s += INTERVAL_S
        old = telemetry(PLAN, tier(ttft_ms_p99=9000.0), time_s=5.0, age_s=story.now_s)
        assert story.detector.see(old, story.now_s) is None


def test_time_in_which_nobody_looked_is_not_time_in_which_it_was_slow() -> None:
    story = quick().intervals(8, ttft_ms_p99=9000.0)
    story.now_s += 300.0
    story.intervals(8, ttft_ms_p99=9000.0)
    assert story.found == []


def test_tiers_are_told_apart() -> None:
    detector = SlowdownDetector(PLAN.tier_names, factor=3.0, for_s=30.0)
    found = []
    for turn in range(1200):
        now_s = turn * INTERVAL_S
        slow = 5000.0 if turn > 1000 else 1000.0
        seen = telemetry(PLAN, tier(ttft_ms_p99=200.0), tier(ttft_ms_p99=slow), time_s=now_s)
        found.append(detector.see(seen, now_s))
    assert [slowdown.tier for slowdown in found if slowdown is not None] == ["T1"]
