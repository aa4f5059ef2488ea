"""A live engine over a real page and a real control socket, in a time that the tests move."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("prometheus_client")

from tests.engine_bridge.live.engine_page import PLAN, EnginePage, Pages, served
from trimtab.engine_bridge.allocation import UNLIMITED, Allocation
from trimtab.engine_bridge.engine import Engine
from trimtab.engine_bridge.errors import AllocationError
from trimtab.engine_bridge.live.live_engine import LiveEngine, NoticeKind, Reading
from trimtab.engine_bridge.live.snapshot import (
    Snapshot,
    TelemetryUnavailableError,
    Unavailable,
)
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.engine_bridge.vllm.control_errors import (
    ControlRefusedError,
    ControlUnavailableError,
)
from trimtab.engine_bridge.vllm.control_server import ControlServer
from trimtab.engine_bridge.vllm.control_store import AllocationStore

STATIC = Allocation.static(PLAN)
OTHER = replace(STATIC, weights=(4000.0, 100.0, 5.0, 1.0))
WAIT_S = 20.0


class Clocks:
    """Monotonic and wall time; they can come apart."""

    def __init__(self) -> None:
        self.monotonic = 1000.0
        self.unix = EnginePage().unix_s
        self.waits: list[float] = []
        self.on_wait: Callable[[float], None] = lambda _: None

    def monotonic_s(self) -> float:
        return self.monotonic

    def unix_s(self) -> float:
        return self.unix

    def pass_s(self, seconds: float) -> None:
        self.monotonic += seconds
        self.unix += seconds

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.pass_s(seconds)
        self.on_wait(seconds)


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def pages() -> Pages:
    return Pages(EnginePage())


@pytest.fixture
def path(tmp_path: Path, clocks: Clocks) -> Iterator[Path]:
    """A real control socket, whose leases run by the tests' clock."""
    store = AllocationStore(PLAN, clock=clocks.monotonic_s)
    with ControlServer(store, path=tmp_path / "c.sock", switch_interval_s=None) as server:
        assert server.path is not None
        yield server.path


@pytest.fixture
def make(pages: Pages, path: Path, clocks: Clocks) -> Iterator[Callable[..., LiveEngine]]:
    made: list[LiveEngine] = []

    def new(holder: str = "me", plan: Plan = PLAN, **how: Any) -> LiveEngine:
        usual = {"control": ControlClient(path), "threaded": False}
        usual |= {"monotonic_s": clocks.monotonic_s, "unix_s": clocks.unix_s, "wait": clocks.wait}
        control = how.pop("control", usual.pop("control"))
        made.append(LiveEngine(plan, pages, control, holder=holder, **(usual | how)))
        return made[-1]

    yield new
    for engine in made:
        engine.close()


@pytest.fixture
def engine(make: Callable[..., LiveEngine]) -> LiveEngine:
    return make()


def telemetry(reading: Reading) -> Telemetry:
    assert reading.telemetry is not None
    return reading.telemetry


def interval(pages: Pages, clocks: Clocks, *tiers: Any, interval_s: float = 2.0) -> None:
    clocks.pass_s(interval_s)
    pages.page.interval(*tiers, interval_s=interval_s)


def test_it_is_an_engine(engine: LiveEngine) -> None:
    as_engine: Engine = engine
    assert as_engine.allocation == STATIC
    assert not as_engine.finished


@pytest.mark.parametrize("shown", ["none", "nan", "own", "other"])
def test_figures_of_another_engine_than_the_sockets_are_refused(
    make: Callable[..., LiveEngine], path: Path, clocks: Clocks, pages: Pages, shown: str
) -> None:
    with ControlClient(path) as client:
        own = client.get()["start_id"]
    ids = {"none": None, "nan": math.nan, "own": own, "other": own ^ 1}
    pages.page = EnginePage(start_id=ids[shown])
    engine = make()
    engine.poll()
    interval(pages, clocks, served(3))
    reading = engine.poll()
    assert reading.control is not None
    assert reading.control.start_id == own
    if shown == "other":
        assert reading.telemetry is None
        assert reading.failure is not None
        assert reading.failure.reason is Unavailable.OTHER_ENGINE
        assert f"start_id {own ^ 1}, not {own}" in str(reading.failure)
    else:
        assert (reading.failure, reading.fresh) == (None, True)


def test_figures_and_what_holds_come_together(
    engine: LiveEngine, pages: Pages, clocks: Clocks
) -> None:
    first = engine.poll()
    assert (first.telemetry, first.fresh, first.failure, first.control_failure) == (
        *(None, False, None),
        "",
    )
    held = engine.apply(OTHER)
    interval(pages, clocks, served(3))
    second = engine.poll()
    seen = telemetry(second)
    assert second.fresh
    assert (seen.tiers[0].arrivals, seen.interval_s, seen.age_s) == (3, 2.0, 0.0)
    # The page does not show it yet: the socket's own answer is the newer one.
    assert (seen.applied, seen.read_back) == (held, True)
    assert second.control is not None
    assert second.control.allocation == held == engine.allocation
    assert (second.control.holder, second.control.state) == ("me", "leased")
    assert second.control.plan_digest == PLAN.digest
    assert not engine.poll().fresh


def test_the_age_grows_by_our_own_clock_whatever_the_wall_clock_does(
    engine: LiveEngine, pages: Pages, clocks: Clocks
) -> None:
    engine.poll()
    interval(pages, clocks, served(1))
    pages.delay_s = 0.4
    clocks.pass_s(0.25)
    assert telemetry(engine.poll()).age_s == pytest.approx(0.4)
    clocks.pass_s(1.0)
    clocks.unix -= 86_400
    late = engine.poll()
    assert telemetry(late).age_s == pytest.approx(1.4)
    assert (late.fresh, late.notices) == (False, ())
    clocks.unix += 86_400
    interval(pages, clocks, served(1))
    clocks.pass_s(0.75)
    # The engine's clock says that they waited for longer than the source knows of.
    assert telemetry(engine.poll()).age_s == pytest.approx(2.0)


def test_a_clock_that_jumps_is_named_once_and_changes_no_age(
    engine: LiveEngine, pages: Pages, clocks: Clocks
) -> None:
    engine.poll()
    noticed = []
    pages.delay_s = 0.3
    for jump_s in (3600, 0, 0, -7200, 3600, -3600):
        clocks.unix += jump_s
        interval(pages, clocks, served(1))
        reading = engine.poll()
        assert telemetry(reading).age_s == pytest.approx(0.3)
        noticed.append([notice.kind for notice in reading.notices])
    skew = [NoticeKind.CLOCK_SKEW]
    assert noticed == [skew, [], [], [], [], skew]


def test_what_fails_leaves_the_old_figures_and_says_why(
    engine: LiveEngine, pages: Pages, clocks: Clocks
) -> None:
    engine.poll()
    interval(pages, clocks, served(3))
    before = telemetry(engine.poll())
    pages.error = TelemetryUnavailableError(Unavailable.REFUSED, "503")
    clocks.pass_s(7.0)
    held = engine.apply(OTHER)
    reading = engine.poll()
    assert not reading.fresh
    assert reading.failure is pages.error
    assert telemetry(reading) == replace(before, age_s=7.0, applied=held, read_back=True)
    pages.error = None
    interval(pages, clocks, served(2))
    again = engine.poll()
    assert again.failure is None
    assert telemetry(again).tiers[0].arrivals == 2


def test_a_page_that_is_not_right_is_named_with_its_place(
    engine: LiveEngine, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = Snapshot(values={"steps_total": {"": 1.0}}, delay_s=0.0)
    monkeypatch.setattr(pages, "read", lambda: empty)
    failure = engine.poll().failure
    assert failure is not None
    assert failure.reason is Unavailable.MISSING_SERIES
    assert str(failure).startswith("the page: missing: ")


def test_an_engine_that_starts_again_is_noticed(
    engine: LiveEngine, pages: Pages, clocks: Clocks
) -> None:
    engine.poll()
    for _ in range(3):
        interval(pages, clocks, served(3))
    engine.poll()
    pages.page.restart()
    interval(pages, clocks, served(1))
    reading = engine.poll()
    assert [notice.kind for notice in reading.notices] == [NoticeKind.RESTARTED]
    assert (telemetry(reading).time_s, telemetry(reading).tiers[0].arrivals) == (2.0, 1)
    assert engine.now_s == 2.0


def test_without_a_control_socket_the_page_says_what_holds(
    make: Callable[..., LiveEngine], pages: Pages, clocks: Clocks, tmp_path: Path
) -> None:
    engine = make(control=ControlClient(tmp_path / "nobody.sock"))
    engine.poll()
    shown = replace(OTHER, version=5)
    pages.page.interval(served(1), applied=shown)
    reading = engine.poll()
    assert reading.control is None
    assert "nobody.sock" in reading.control_failure
    assert (telemetry(reading).applied, telemetry(reading).read_back) == (shown, False)
    with pytest.raises(ControlUnavailableError):
        engine.apply(OTHER)
    assert engine.lease_left_s == 0.0


def test_the_lease_as_we_know_it_never_outlasts_the_engines(
    engine: LiveEngine, clocks: Clocks
) -> None:
    assert engine.lease_left_s == 0.0
    engine.apply(OTHER)
    assert engine.lease_left_s == PLAN.controller.lease_s
    clocks.pass_s(4.0)
    assert engine.lease_left_s == PLAN.controller.lease_s - 4.0
    engine.apply(OTHER, ttl_s=3.0)
    clocks.pass_s(3.0)
    assert engine.lease_left_s == 0.0
    engine.poll()
    assert replace(engine.allocation, version=0) == STATIC
    engine.apply(OTHER, ttl_s=math.inf)
    assert engine.lease_left_s == 86_400.0
    engine.release()
    assert engine.lease_left_s == 0.0
    assert replace(engine.allocation, version=0) == STATIC


def test_another_holders_lease_is_seen_and_kept(
    make: Callable[..., LiveEngine], engine: LiveEngine, clocks: Clocks
) -> None:
    engine.apply(OTHER)
    other = make("other")
    view = other.poll().control
    assert view is not None
    assert (view.holder, view.lease_left_s) == ("me", PLAN.controller.lease_s)
    assert other.lease_left_s == 0.0
    with pytest.raises(ControlRefusedError) as error:
        other.apply(STATIC)
    assert error.value.code == "held"
    with pytest.raises(ControlRefusedError):
        other.release()
    clocks.pass_s(PLAN.controller.lease_s + 1)
    other.apply(STATIC)
    assert engine.poll().control.holder == "other"  # type: ignore[union-attr]
    assert engine.lease_left_s == 0.0


def test_an_engine_of_another_plan_is_shown_without_its_allocation(
    make: Callable[..., LiveEngine],
) -> None:
    engine = make(plan=load_plan("published"))
    view = engine.poll().control
    assert view is not None
    assert (view.allocation, view.plan, view.plan_digest) == (None, PLAN.name, PLAN.digest)


def test_what_is_no_number_is_not_asked_for(engine: LiveEngine) -> None:
    engine.poll()
    wish = replace(
        OTHER,
        weights=(math.nan, 100.0, 5.0, 1.0),
        slack_fraction=math.inf,
        max_running=(UNLIMITED,) * 4,
        kv_fractions=tuple(np.float32([0.68, 0.21, 0.11])),
        prefill_budget_tokens=np.int64(6000),  # type: ignore[arg-type]
    )
    held = engine.apply(wish)
    assert held.weights == STATIC.weights
    assert held.slack_fraction == STATIC.slack_fraction
    assert held.prefill_budget_tokens == 6000
    assert held.kv_fractions != STATIC.kv_fractions


def test_an_allocation_of_another_plan_is_never_sent(engine: LiveEngine) -> None:
    with pytest.raises(AllocationError):
        engine.apply(replace(STATIC, weights=(1.0,)))
    assert engine.poll().control.holder is None  # type: ignore[union-attr]


class Odd(ControlClient):
    """Answers what a test says."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def get(self) -> Any:
        return self.answer

    def set(self, values: Mapping[str, object], **how: Any) -> Any:
        return self.answer

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"ok": True, "version": "x", "plan_digest": PLAN.digest},
        {"version": 1, "plan_digest": PLAN.digest, "allocation": {"weights": {"T9": 1}}},
        {"version": 1, "plan_digest": PLAN.digest, "allocation": 7, "holder": None},
        {"version": math.inf, "plan_digest": "other", "allocation": {}, "holder": None},
    ],
)
def test_an_answer_that_makes_no_sense_is_no_answer(
    make: Callable[..., LiveEngine], answer: Any
) -> None:
    engine = make(control=Odd(answer))
    reading = engine.poll()
    assert reading.control is None
    assert "not that of a Trimtab engine" in reading.control_failure
    with pytest.raises(ControlUnavailableError):
        engine.apply(OTHER)
    assert engine.lease_left_s == 0.0


def test_advance_waits_for_the_grid_of_the_engine(
    engine: LiveEngine, pages: Pages, clocks: Clocks
) -> None:
    pages.page.time_s = 7.3
    pages.page.interval(served(1), interval_s=0.0)
    running_s = [0.0]

    def work(seconds: float) -> None:
        """The engine ends an interval every half second, some thousandths after the grid."""
        running_s[0] += seconds
        while running_s[0] >= 0.5:
            running_s[0] -= 0.5
            pages.page.interval(served(1), interval_s=0.5)

    clocks.on_wait = work
    ends_s = []
    for _ in range(3):
        seen = engine.advance(2.0)
        ends_s.append(seen.time_s)
        assert seen.tiers[0].arrivals == round(seen.interval_s / 0.5)
    assert ends_s == pytest.approx([8.3, 10.3, 12.3])
    assert engine.now_s == pytest.approx(12.3)
    # It sleeps for most of an interval and then looks often: it does not ask all the time.
    assert pages.reads < 30


def test_advance_gives_up_in_the_end_and_says_why(
    engine: LiveEngine, pages: Pages, clocks: Clocks
) -> None:
    pages.page.interval(served(1))
    began_s = clocks.monotonic
    with pytest.raises(TelemetryUnavailableError, match="no interval of 2 s"):
        engine.advance(2.0)
    assert clocks.monotonic - began_s < 8.0
    pages.error = TelemetryUnavailableError(Unavailable.UNREACHABLE, "gone")
    with pytest.raises(TelemetryUnavailableError, match="gone"):
        engine.advance(2.0)


class Hangs:
    """A source that answers when a test lets it."""

    place = "the hanging page"

    def __init__(self, page: EnginePage) -> None:
        self.page, self.reads = page, 0
        self.go = threading.Semaphore(0)
        self.begun, self.ended = threading.Semaphore(0), threading.Semaphore(0)
        self.closed = threading.Event()

    def read(self) -> Snapshot:
        self.reads += 1
        found = self.page.snapshot()
        self.begun.release()
        assert self.go.acquire(timeout=WAIT_S)
        self.ended.release()
        return found

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def hanging(path: Path) -> Iterator[tuple[LiveEngine, Hangs]]:
    """In real time, because a thread does not wait for another clock."""
    source = Hangs(EnginePage())
    engine = LiveEngine(PLAN, source, ControlClient(path), holder="me", read_deadline_s=0.1)
    yield engine, source
    for _ in range(10):
        source.go.release()
    engine.close()


def test_a_source_that_hangs_costs_a_deadline_and_is_not_asked_twice(
    hanging: tuple[LiveEngine, Hangs],
) -> None:
    engine, source = hanging
    for _ in range(3):
        reading = engine.poll()
        assert reading.failure is not None
        assert reading.failure.reason is Unavailable.TIMEOUT
        assert "the hanging page" in str(reading.failure)
        assert reading.control is not None
    assert source.reads == 1


def test_figures_that_came_too_late_are_used_by_the_next_look(
    hanging: tuple[LiveEngine, Hangs],
) -> None:
    engine, source = hanging
    assert source.begun.acquire(blocking=False) is False
    engine.poll()
    assert source.begun.acquire(timeout=WAIT_S)
    source.page.interval(served(4))
    source.go.release()
    assert source.ended.acquire(timeout=WAIT_S)
    # The first figures are the late ones; the next ones hang as well, and come late again.
    first = engine.poll()
    assert (first.failure, first.telemetry) == (None, None)
    assert source.begun.acquire(timeout=WAIT_S)
    source.go.release()
    assert source.ended.acquire(timeout=WAIT_S)
    second = engine.poll()
    assert second.fresh
    assert telemetry(second).tiers[0].arrivals == 4


def test_a_fault_of_a_source_does_not_end_the_reading(path: Path) -> None:
    pages = Pages(EnginePage())
    pages.error = RuntimeError("a bug")
    engine = LiveEngine(PLAN, pages, ControlClient(path), holder="me", read_deadline_s=WAIT_S)
    reading = engine.poll()
    assert reading.failure is not None
    assert "RuntimeError: a bug" in str(reading.failure)
    pages.error = None
    assert engine.poll().failure is None
    engine.close()


def test_the_end_waits_for_nobody(hanging: tuple[LiveEngine, Hangs]) -> None:
    engine, source = hanging
    engine.poll()
    engine.close()
    source.go.release()
    assert source.closed.wait(WAIT_S)
