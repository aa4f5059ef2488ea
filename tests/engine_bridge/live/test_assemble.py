"""Telemetry out of an engine's real page: differences, resets, names, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("prometheus_client")

from tests.engine_bridge.live.engine_page import PLAN, EnginePage, served
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.live.assemble import Assembler, Taken
from trimtab.engine_bridge.live.reading import NoticeKind
from trimtab.engine_bridge.live.scrape import parse
from trimtab.engine_bridge.live.snapshot import Snapshot, TelemetryUnavailableError, Unavailable
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry

WHOLE = [name for name, kind in TierTelemetry.__annotations__.items() if kind == "int"]


@pytest.fixture
def page() -> EnginePage:
    return EnginePage()


@pytest.fixture
def assembler() -> Assembler:
    return Assembler(PLAN)


def kinds(taken: Taken) -> list[NoticeKind]:
    return [notice.kind for notice in taken.notices]


def edited(page: EnginePage, pattern: str, by: str) -> Snapshot:
    text, count = re.subn(pattern, by, page.text.decode(), flags=re.MULTILINE)
    assert count
    return parse(text.encode(), "0")


def told(assembler: Assembler) -> Telemetry:
    assert assembler.latest is not None
    return assembler.latest


def test_an_interval_comes_back_as_the_engine_reported_it(
    page: EnginePage, assembler: Assembler
) -> None:
    assert not assembler.take(page.snapshot()).fresh
    assert assembler.latest is None
    applied = replace(Allocation.static(PLAN), weights=(9.0, 3.0, 2.0, 1.0), version=7)
    first = served(
        4,
        attainment=0.75,
        queue_length=2,
        oldest_wait_s=1.5,
        ttft_ms_p50=120.0,
        ttft_ms_p99=820.5,
        acceptance=0.5,
        kv_blocks_used=33,
    )
    page.interval(first, served(1), steps=17, kv_use_fraction=0.25, applied=applied)
    taken = assembler.take(page.snapshot())
    seen = told(assembler)
    assert (taken.fresh, taken.notices) == (True, ())
    for field in fields(TierTelemetry):
        found, real = getattr(seen.tiers[0], field.name), getattr(first, field.name)
        assert found == pytest.approx(real, nan_ok=True), field.name
        assert type(found) is type(real) or field.name not in WHOLE
    assert math.isnan(seen.tiers[2].attainment)
    assert (seen.time_s, seen.interval_s, seen.steps) == (2.0, 2.0, 17)
    assert (seen.kv_use_fraction, seen.step_ms_mean, seen.batch_mean) == (0.25, 10.0, 12.5)
    assert seen.applied == applied


def test_what_was_missed_is_not_lost(page: EnginePage, assembler: Assembler) -> None:
    assembler.take(page.snapshot())
    page.interval(served(4))
    page.interval(served(2, attainment=0.0, met_tokens=0.0))
    assembler.take(page.snapshot())
    seen = told(assembler)
    assert (seen.time_s, seen.interval_s) == (4.0, 4.0)
    assert seen.tiers[0].arrivals == 6
    assert seen.tiers[0].attainment == pytest.approx(4 / 6)


def test_the_same_again_is_nothing_new(page: EnginePage, assembler: Assembler) -> None:
    page.interval(served(1))
    assembler.take(page.snapshot())
    page.interval(served(2))
    assert assembler.take(page.snapshot()).fresh
    before = told(assembler)
    taken = assembler.take(page.snapshot())
    assert not taken.fresh
    assert not taken.first_sight
    assert told(assembler) is before


def test_an_interval_that_is_not_due_is_told_of_later(
    page: EnginePage, assembler: Assembler
) -> None:
    assembler.take(page.snapshot())
    page.interval(served(1), interval_s=0.7)
    assert not assembler.take(page.snapshot(), due_s=2.0).fresh
    page.interval(served(1), interval_s=1.3)
    assert assembler.take(page.snapshot(), due_s=2.0).fresh
    assert told(assembler).tiers[0].arrivals == 2


def test_an_engine_that_starts_again_is_named(page: EnginePage, assembler: Assembler) -> None:
    page.interval(served(50))
    page.interval(served(50))
    assembler.take(page.snapshot())
    page.restart()
    waits = assembler.take(page.snapshot())
    assert kinds(waits) == [NoticeKind.RESTARTED]
    assert not waits.fresh
    page.interval(served(3))
    assert assembler.take(page.snapshot()).notices == ()
    assert (told(assembler).time_s, told(assembler).tiers[0].arrivals) == (2.0, 3)


def test_an_engine_whose_first_interval_was_missed_counts_from_zero(
    page: EnginePage, assembler: Assembler
) -> None:
    page.interval(served(50))
    page.interval(served(50))
    assembler.take(page.snapshot())
    page.restart()
    page.interval(served(120), interval_s=3.0)
    taken = assembler.take(page.snapshot())
    seen = told(assembler)
    assert kinds(taken) == [NoticeKind.RESTARTED]
    # T0's own counters did not fall below those of before: others did, and all are of one process.
    assert (seen.interval_s, seen.tiers[0].arrivals) == (3.0, 120)


def test_counters_of_a_kept_folder_go_on_over_a_restart(
    page: EnginePage, assembler: Assembler
) -> None:
    page.interval(served(50))
    page.interval(served(50))
    assembler.take(page.snapshot())
    page.time_s = 0.0
    page.interval(served(4))
    taken = assembler.take(page.snapshot())
    assert kinds(taken) == [NoticeKind.RESTARTED]
    assert "where they were" in taken.notices[0].text
    assert told(assembler).tiers[0].arrivals == 4


def test_a_counter_that_falls_is_named(page: EnginePage, assembler: Assembler) -> None:
    page.interval(served(9))
    assembler.take(page.snapshot())
    before_s = page.time_s
    page.restart()
    page.time_s = before_s
    page.interval(served(2))
    taken = assembler.take(page.snapshot())
    assert kinds(taken) == [NoticeKind.COUNTER_RESET]
    assert "arrivals" in taken.notices[0].text
    assert told(assembler).tiers[0].arrivals == 2


@pytest.mark.parametrize(
    ("pattern", "by", "old"),
    [
        (r"^trimtab_arrivals_total\{", "trimtab_arrivals{", "arrivals_total"),
        (r"^trimtab_service_seconds_total\{", "trimtab_service{", "service_seconds_total"),
        (r"^trimtab_kv_use_ratio\{", "trimtab_kv_use{", "kv_use_ratio"),
    ],
)
def test_a_series_under_another_known_name_is_taken_and_named_once(
    page: EnginePage, assembler: Assembler, pattern: str, by: str, old: str
) -> None:
    page.interval(served(2, service_ms=40.0))
    taken = assembler.take(edited(page, pattern, by))
    assert kinds(taken) == [NoticeKind.RENAMED]
    assert old in taken.notices[0].text
    page.interval(served(2, service_ms=40.0), kv_use_fraction=0.5)
    taken = assembler.take(edited(page, pattern, by))
    assert taken.notices == ()
    seen = told(assembler)
    assert (seen.tiers[0].arrivals, seen.kv_use_fraction) == (2, 0.5)
    assert seen.tiers[0].service_ms == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("pattern", "by", "reason", "words"),
    [
        (r"^trimtab_running\{.*\n", "", Unavailable.MISSING_SERIES, "trimtab_running{T0}"),
        (
            r"^trimtab_queue_length\{",
            "trimtab_queue_lengths{",
            Unavailable.MISSING_SERIES,
            'did you mean "trimtab_queue_lengths"?',
        ),
        (r'^trimtab_finished_total\{.*tier="T2".*\n', "", Unavailable.MISSING_SERIES, "{T2}"),
        (r"^(trimtab_steps_total\S*) .*", r"\1 NaN", Unavailable.MALFORMED, "steps_total is nan"),
        (r"^(trimtab_running\S*) .*", r"\1 NaN", Unavailable.MALFORMED, "trimtab_running{T0}"),
        (r"^(trimtab_engine_time\S*) .*", r"\1 NaN", Unavailable.MALFORMED, "engine_time"),
        (r"^(trimtab_arrivals_total\S*) .*", r"\1 -3", Unavailable.MALFORMED, "is -3"),
        (r"^(trimtab_ttft_p99\S*) .*", r"\1 +Inf", Unavailable.MALFORMED, "is inf"),
        (r'tier="T3"', 'tier="gold"', Unavailable.MALFORMED, "plan default are T0, T1, T2, T3"),
        (r"^(trimtab_\w+(?:\{.*\})?) .*", r"\1 NaN", Unavailable.MALFORMED, "nan"),
    ],
)
def test_what_is_not_right_is_refused_and_forgets_nothing(
    page: EnginePage,
    assembler: Assembler,
    pattern: str,
    by: str,
    reason: Unavailable,
    words: str,
) -> None:
    assembler.take(page.snapshot())
    page.interval(served(1))
    with pytest.raises(TelemetryUnavailableError) as error:
        assembler.take(edited(page, pattern, by))
    assert error.value.reason is reason
    assert words in str(error.value)
    page.interval(served(2))
    assert assembler.take(page.snapshot()).fresh
    assert told(assembler).tiers[0].arrivals == 3


def test_many_missing_series_are_counted(page: EnginePage, assembler: Assembler) -> None:
    with pytest.raises(TelemetryUnavailableError, match=r"and \d+ more"):
        assembler.take(edited(page, r"^trimtab_\w+_total\{.*\n", ""))


def test_without_the_gauges_of_the_allocation_the_rest_is_told(
    page: EnginePage, assembler: Assembler
) -> None:
    def lacking() -> Snapshot:
        return edited(page, r"^trimtab_allocation_weight\{.*\n", "")

    taken = assembler.take(lacking())
    assert kinds(taken) == [NoticeKind.MISSING_SERIES]
    page.interval(served(1))
    assert assembler.take(lacking()).notices == ()
    assert told(assembler).applied == Allocation.static(PLAN)


def test_one_counter_a_moment_older_makes_no_more_than_all(
    page: EnginePage, assembler: Assembler
) -> None:
    assembler.take(page.snapshot())
    page.interval(served(4))
    assembler.take(edited(page, r"^(trimtab_judged_total\S*) .*", r"\1 2"))
    assert told(assembler).tiers[0].attainment == 1.0


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), st.lists(st.integers(0, 40), min_size=4, max_size=4)),
        st.sampled_from([("read", []), ("restart", []), ("nothing", []), ("broken", [])]),
    ),
    max_size=30,
)


def check(telemetry: Telemetry) -> None:
    """Nothing in it is negative, and it has the plan's shape."""
    assert len(telemetry.tiers) == len(PLAN.tiers)
    telemetry.applied.check_shape(PLAN)
    assert telemetry.interval_s > 0
    assert telemetry.steps >= 0
    for tier in telemetry.tiers:
        for name in WHOLE:
            assert getattr(tier, name) >= 0, name
            assert type(getattr(tier, name)) is int
        assert tier.met_tokens >= 0
        assert tier.service_ms >= 0
        assert tier.has_attainment == (tier.attainment_samples > 0)
        assert not tier.has_attainment or 0 <= tier.attainment <= 1


@given(EVENTS)
def test_whatever_is_missed_the_sums_are_the_counters_growth(
    events: list[tuple[str, list[int]]],
) -> None:
    page, assembler = EnginePage(), Assembler(PLAN)
    assembler.take(page.snapshot())
    summed = [0, 0, 0, 0]
    # What a reader can know: all that came, but for what a restart wiped before it was read.
    unread, known = [0, 0, 0, 0], [0, 0, 0, 0]
    for event, numbers in [*events, ("read", [])]:
        if event == "serve":
            page.interval(*(served(number) for number in numbers))
            unread = [a + b for a, b in zip(unread, numbers, strict=True)]
        elif event == "restart":
            page.restart()
            unread = [0, 0, 0, 0]
        elif event == "broken":
            with pytest.raises(TelemetryUnavailableError):
                assembler.take(edited(page, r"^(trimtab_arrivals_total\S*) .*", r"\1 NaN"))
        elif event == "read":
            ahead = page.time_s > assembler.time_s
            if assembler.take(page.snapshot()).fresh:
                check(told(assembler))
                summed = add(summed, told(assembler))
                known = [a + b for a, b in zip(known, unread, strict=True)]
                unread = [0, 0, 0, 0]
            assert assembler.time_s == page.time_s or not ahead
    assert all(s <= k for s, k in zip(summed, known, strict=True))
    if not hides_a_restart(events):
        assert summed == known


def add(sums: list[int], telemetry: Telemetry) -> list[int]:
    return [a + tier.finished for a, tier in zip(sums, telemetry.tiers, strict=True)]


def hides_a_restart(events: list[tuple[str, list[int]]]) -> bool:
    """Whether an engine started again and then, unread, ran for as long as the one before it."""
    read_s = now_s = 0.0
    restarted = False
    for event, _ in [*events, ("read", [])]:
        if event == "serve":
            now_s += 2.0
        elif event == "restart":
            now_s, restarted = 0.0, True
        elif event == "read":
            if restarted and now_s >= read_s > 0:
                return True
            read_s, restarted = now_s, False
    return False


@given(
    st.dictionaries(
        st.sampled_from(["arrivals_total", "running", "steps_total", "engine_time_seconds"]),
        st.dictionaries(st.sampled_from(["", "T0", "T3", "gold"]), st.floats(), max_size=3),
    )
)
def test_any_figures_give_telemetry_or_a_reason(
    strange: Mapping[str, Mapping[str, float]],
) -> None:
    page, assembler = EnginePage(), Assembler(PLAN)
    assembler.take(page.snapshot())
    page.interval(served(1))
    whole = page.snapshot()
    try:
        taken = assembler.take(replace(whole, values={**whole.values, **strange}))
    except TelemetryUnavailableError:
        return
    if taken.fresh:
        check(told(assembler))
