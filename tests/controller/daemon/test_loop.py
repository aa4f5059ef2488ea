"""One engine's loop, tick by tick, beside a virtual engine whose links fail on demand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.virtual_deployment import HANGS_S, SPEC, Page, Port, VirtualClock, VirtualEngine
from trimtab.agents.audit_entry import digest_of
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.policy import Policy
from trimtab.agents.static import StaticPolicy
from trimtab.agents.verdict import GuardMode, GuardReason
from trimtab.controller.daemon.audit_log import Head
from trimtab.controller.daemon.bundle_watch import Offer
from trimtab.controller.daemon.command import Command, CommandKind
from trimtab.controller.daemon.loop import EngineLoop
from trimtab.controller.daemon.policy_deadline import PolicyWithDeadline
from trimtab.controller.daemon.state import MOST_HISTORY, Contact, LoopState
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.live.live_engine import LiveEngine
from trimtab.engine_bridge.live.snapshot import Unavailable
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.generate import generate

PLAN = load_plan()
OTHER_PLAN = with_values(PLAN, {"tiers.T1.weight": 90})
STATIC = Allocation.static(PLAN)
INTERVAL_S = float(PLAN.controller.interval_s)
LEASE_S = float(PLAN.controller.lease_s)
GUARD = GuardSettings(probation_s=10.0, ramp_s=0.0, cool_down_s=20.0)
HOLDER = "trimtab@test:1"
RIVAL = "somebody else"


@cache
def traffic() -> Trace:
    return generate(hours=0.1, seed=2, load=0.2, spec=SPEC)


class Heavier(Policy):
    """Wants T1 heavier, or fails."""

    name = "heavier"
    summary = "wants T1 heavier"

    def __init__(self, factor: float = 1.2) -> None:
        self.factor = factor
        self.fault: Exception | None = None
        self.sleep: Callable[[], None] | None = None

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        if self.sleep is not None:
            sleep, self.sleep = self.sleep, None
            sleep()
        if self.fault is not None:
            raise self.fault
        weights = list(STATIC.weights)
        weights[1] *= self.factor
        return replace(STATIC, weights=tuple(weights))


class Source:
    """Gives one policy, and another one when told to."""

    name = "heavier"

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.error = ""
        self.next: Policy | None = None
        self.reloads = 0

    def first(self) -> Offer:
        return self.offer(self.policy, "a" * 64)

    def offer(self, policy: Policy, digest: str) -> Offer:
        seated = PolicyWithDeadline(policy, deadline_s=0.0, threaded=False)
        seated.reset(PLAN, 0)
        return Offer(policy=seated, bundle_digest=digest)

    def newer(self) -> Offer | None:
        policy, self.next = self.next, None
        return None if policy is None else self.offer(policy, "b" * 64)

    def reload(self) -> None:
        self.reloads += 1


class Record:
    """An `Audit` that keeps the entries in memory."""

    def __init__(self) -> None:
        self.entries: list[Mapping[str, Any]] = []
        self.lost, self.failure = 0, ""

    def begin(self, head: Head) -> None:
        self.entries.append(head())

    def append(self, entry: Mapping[str, object]) -> None:
        self.entries.append(entry)

    def close(self, timeout_s: float = 5.0) -> None:
        pass

    def kinds(self) -> list[str]:
        return [entry["kind"] for entry in self.entries]


class Bench:
    """An engine, its links and a loop."""

    def __init__(self, *, mode: GuardMode = GuardMode.ACTIVE, loop_plan: Plan = PLAN) -> None:
        self.clock = VirtualClock()
        self.engine = VirtualEngine(PLAN, traffic(), self.clock)
        self.page, self.port = Page(self.engine), Port(self.engine)
        self.policy = Heavier()
        self.source, self.record = Source(self.policy), Record()
        live = LiveEngine(
            loop_plan, self.page, self.port, holder=HOLDER, threaded=False,
            monotonic_s=self.clock.monotonic_s, unix_s=self.clock.unix_s,
        )  # fmt: skip
        self.loop = EngineLoop(
            "a", live, self.source, self.record, holder=HOLDER, settings=GUARD, mode=mode,
            monotonic_s=self.clock.monotonic_s, unix_s=self.clock.unix_s,
        )  # fmt: skip

    def pass_time(self, length_s: float) -> None:
        """The engine works, nobody ticks."""
        for _ in range(round(length_s)):
            self.clock.now_s += 1.0
            self.engine.step(1.0)

    def ticks(self, count: int = 1) -> LoopState:
        for _ in range(count):
            self.pass_time(INTERVAL_S)
            state = self.loop.tick()
        return state

    def acting(self) -> Bench:
        """Tick until the policy's whole residual is applied."""
        self.ticks(12)
        assert self.engine.holds.weights[1] == pytest.approx(120.0)
        return self

    def rival_sets(self, values: Mapping[str, object], ttl_s: float = 5.0) -> None:
        request = {"op": "set", "holder": RIVAL, "values": values, "ttl_s": ttl_s}
        self.engine.answers.answer(request)


def is_static(allocation: Allocation | None) -> bool:
    return allocation is not None and replace(allocation, version=0) == STATIC


def order(kind: CommandKind, mode: GuardMode | None = None) -> Command:
    return Command(kind=kind, mode=mode, by="test")


def test_it_holds_the_lease_with_the_static_plan_before_there_are_figures() -> None:
    bench = Bench()
    assert bench.loop.state.contact is Contact.STARTING
    assert bench.loop.state.history == ()
    state = bench.loop.tick()
    assert state.contact is Contact.NO_TELEMETRY
    assert bench.engine.store.describe().holder == HOLDER
    assert is_static(bench.engine.holds)
    assert state.lease_left_s == LEASE_S
    assert state.holder == HOLDER


def test_a_policy_acts_after_its_probation_and_never_before() -> None:
    bench = Bench()
    bench.pass_time(3600.0)  # The engine is not new: the probation is the loop's.
    held = []
    for _ in range(10):
        state = bench.ticks()
        held.append(is_static(state.history[-1].asked))
    assert held == [True] * 6 + [False] * 4
    assert state.contact is Contact.CONTROLLING
    assert state.history[-1].applied == bench.engine.holds
    assert state.tally.trips == 0
    assert state.detail == ""


def test_shadow_applies_static_and_shows_what_it_would_do() -> None:
    bench = Bench(mode=GuardMode.SHADOW)
    bench.ticks(20)
    assert is_static(bench.engine.holds)
    decisions = [entry for entry in bench.record.entries if entry["kind"] == "decision"]
    assert decisions[-1]["verdict"]["proposed"] != decisions[-1]["verdict"]["apply"]


def test_old_figures_first_keep_then_end_the_policy_and_new_ones_begin_a_probation() -> None:
    bench = Bench().acting()
    bench.page.fault = Unavailable.UNREACHABLE
    state = bench.ticks(2)
    assert not is_static(bench.engine.holds), "a late scrape is no reason to leave"
    state = bench.ticks(5)
    assert state.contact is Contact.NO_TELEMETRY
    assert is_static(bench.engine.holds)
    assert "unreachable" in state.detail
    bench.ticks(30)
    bench.page.fault = None
    assert is_static(bench.ticks(4).history[-1].asked), "the time without figures is no probation"
    assert not is_static(bench.ticks(5).history[-1].asked)


def test_a_lease_that_ran_out_is_noticed_and_begins_a_probation() -> None:
    bench = Bench().acting()
    bench.pass_time(60.0)  # SIGSTOP, or a machine that slept.
    assert is_static(bench.engine.holds)
    state = bench.loop.tick()
    assert state.contact is Contact.CONTROLLING
    assert is_static(bench.ticks(3).history[-1].asked)
    assert not is_static(bench.ticks(5).history[-1].asked)
    reasons = [e["reason"] for e in bench.record.entries if e["kind"] == "interrupted"]
    assert reasons[-1] == "the lease had run out"


def test_a_control_socket_that_is_silent_for_less_than_the_lease_costs_nothing() -> None:
    bench = Bench().acting()
    bench.port.fault = "down"
    state = bench.ticks(3)
    assert state.contact is Contact.NO_CONTROL
    assert state.history[-1].applied is None
    assert state.detail == "control: down"
    assert not is_static(bench.engine.holds)
    bench.port.fault = ""
    assert not is_static(bench.ticks().history[-1].asked)


@pytest.mark.parametrize("fault", ["down", "hung", "garbage", "refused"])
def test_a_control_socket_that_fails_longer_is_the_static_plan(fault: str) -> None:
    bench = Bench().acting()
    bench.port.fault = fault
    for _ in range(8):
        before_s = bench.clock.now_s + INTERVAL_S
        state = bench.ticks()
        assert bench.clock.now_s - before_s <= 2 * HANGS_S
        assert state.contact is Contact.NO_CONTROL
    bench.engine.step(1.0)
    assert is_static(bench.engine.holds)
    assert state.detail
    bench.port.fault = ""
    assert bench.ticks().contact is Contact.CONTROLLING


def test_an_answer_that_gets_lost_is_made_good_by_the_next_tick() -> None:
    bench = Bench().acting()
    bench.port.fault = "unheard"
    bench.ticks(2)
    bench.port.fault = ""
    state = bench.ticks(2)
    assert state.contact is Contact.CONTROLLING
    assert state.tally.trips == 0


def test_another_controllers_engine_is_watched_and_taken_when_it_is_free() -> None:
    bench = Bench()
    bench.rival_sets({"weights": {"T1": 110.0}}, ttl_s=9.0)
    version = bench.engine.store.allocation.version
    state = bench.ticks(4)
    assert state.contact is Contact.STANDBY
    assert state.holder == RIVAL
    assert bench.engine.store.allocation.version == version
    assert state.lease_left_s == 0.0
    state = bench.ticks()
    assert state.contact is Contact.CONTROLLING
    assert is_static(bench.engine.holds)


def test_after_standby_the_policy_begins_with_a_probation() -> None:
    bench = Bench().acting()
    bench.engine.answers.answer({"op": "release", "holder": HOLDER})
    bench.rival_sets({}, ttl_s=20.0)
    assert bench.ticks(5).contact is Contact.STANDBY
    state = bench.ticks(6)
    assert state.contact is Contact.CONTROLLING
    assert is_static(state.history[-1].asked)
    assert not is_static(bench.ticks(7).history[-1].asked)


def test_an_engine_of_another_plan_is_told_nothing() -> None:
    bench = Bench(loop_plan=OTHER_PLAN)
    state = bench.ticks(3)
    assert state.contact is Contact.WRONG_PLAN
    assert PLAN.digest[:12] in state.detail
    assert OTHER_PLAN.digest[:12] in state.detail
    assert bench.engine.store.describe().holder is None


def test_an_engine_with_anothers_figures_is_told_nothing() -> None:
    bench = Bench().acting()
    own, version = bench.engine.store.start_id, bench.engine.store.allocation.version
    bench.page.spoil = lambda values: values.update(start_id={"": float(own ^ 1)})
    state = bench.ticks()
    assert state.contact is Contact.WRONG_ENGINE
    assert f"start_id {own ^ 1}, not {own}" in state.detail
    assert bench.ticks(2).history[-1].applied is None
    assert bench.engine.store.allocation.version == version
    # The lease runs out, and static comes back by itself.
    bench.ticks(int(LEASE_S / INTERVAL_S))
    assert bench.engine.store.describe().holder is None
    bench.page.spoil = lambda values: values.update(start_id={"": float(own)})
    state = bench.ticks()
    assert state.contact is Contact.CONTROLLING
    assert is_static(state.history[-1].asked)


def test_an_engine_that_starts_again_begins_static_with_a_probation() -> None:
    bench = Bench().acting()
    bench.engine.restart()
    state = bench.ticks(2)
    assert is_static(bench.engine.holds)
    assert state.contact is Contact.CONTROLLING
    assert state.tally.trips == 0
    assert not is_static(bench.ticks(8).history[-1].asked)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(ValueError("no"), GuardReason.POLICY_FAILED), (None, GuardReason.NON_FINITE)],
)
def test_a_policy_that_fails_is_static_at_once(
    fault: Exception | None, reason: GuardReason
) -> None:
    bench = Bench().acting()
    bench.policy.fault, bench.policy.factor = fault, float("nan")
    state = bench.ticks()
    assert reason in state.history[-1].reasons
    assert state.history[-1].fell_back
    assert is_static(bench.engine.holds)
    assert state.tally.trips == 1
    assert ("ValueError: no" in state.detail) is (fault is not None)


def test_a_newer_policy_takes_over_between_two_ticks_with_a_probation() -> None:
    bench = Bench().acting()
    bench.source.next = Heavier(1.1)
    state = bench.ticks()
    assert state.bundle_digest == "b" * 64
    assert is_static(bench.engine.holds)
    bench.ticks(10)
    assert bench.engine.holds.weights[1] == pytest.approx(110.0)
    assert bench.record.kinds().count("swap") == 1


def test_what_the_operator_holds_outlives_a_newer_policy() -> None:
    bench = Bench().acting()
    bench.loop.command(order(CommandKind.HOLD))
    bench.ticks()
    bench.source.next = StaticPolicy()
    state = bench.ticks(5)
    assert state.mode is GuardMode.HOLD
    assert bench.engine.holds.weights[1] == pytest.approx(120.0)
    bench.loop.command(order(CommandKind.RELEASE))
    state = bench.ticks(2)
    assert state.mode is GuardMode.ACTIVE
    assert is_static(bench.engine.holds)
    assert state.bundle_digest == "b" * 64


def test_orders_are_carried_out_at_the_next_tick_and_recorded_before_its_decision() -> None:
    bench = Bench()
    bench.ticks(2)
    bench.loop.command(order(CommandKind.MODE, GuardMode.CANARY))
    bench.loop.command(order(CommandKind.RELOAD))
    assert bench.loop.state.mode is GuardMode.ACTIVE
    before = len(bench.record.entries)
    assert bench.ticks().mode is GuardMode.CANARY
    added = bench.record.entries[before:]
    assert [entry.get("command", entry["kind"]) for entry in added] == [
        "mode:canary", "reload", "decision"
    ]  # fmt: skip
    assert bench.source.reloads == 1


def test_each_tick_is_recorded_with_what_the_guard_was_given() -> None:
    bench = Bench()
    bench.loop.tick()
    bench.ticks(3)
    kinds = bench.record.kinds()
    assert kinds[:3] == ["start", "interrupted", "decision"]
    decisions = [entry for entry in bench.record.entries if entry["kind"] == "decision"]
    assert [entry["number"] for entry in decisions] == [1, 2, 3, 4]
    assert decisions[0]["telemetry"] is None
    assert decisions[0]["verdict"] is None
    assert decisions[-1]["digest"] == digest_of(decisions[-1]["telemetry"])
    assert decisions[-1]["contact"] == "controlling"


def test_a_fault_of_our_own_is_a_state_and_a_line_and_no_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench().acting()
    ticks = bench.loop.state.ticks
    with monkeypatch.context() as broken:
        broken.setattr(bench.loop._guard, "decide", lambda telemetry: 1 / 0)
        state = bench.ticks(6)
        assert bench.loop.faults_in_a_row == 6
    assert state.faults == 6
    assert bench.record.kinds()[-1] == "lost", "the guard may have been called without an entry"
    assert "ZeroDivisionError" in state.detail
    assert state.ticks == ticks
    assert len([r for r in caplog.records if "a fault of Trimtab" in r.message]) == 1
    assert is_static(bench.engine.holds), "the lease has run out"
    state = bench.ticks()
    assert bench.loop.faults_in_a_row == 0
    assert state.contact is Contact.CONTROLLING


def test_a_clean_end_gives_the_lease_back_and_static_holds_at_once() -> None:
    bench = Bench().acting()
    bench.loop.close()
    assert bench.engine.store.describe().holder is None
    bench.engine.step(0.0)
    assert is_static(bench.engine.holds)


def test_ending_while_another_one_holds_the_engine_touches_nothing() -> None:
    bench = Bench()
    bench.rival_sets({"weights": {"T1": 110.0}})
    bench.ticks()
    bench.loop.close()
    assert bench.engine.store.describe().holder == RIVAL


def test_a_fault_that_lasts_is_logged_when_it_begins_and_when_it_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "trimtab.daemon")
    bench = Bench().acting()
    caplog.clear()
    bench.page.fault = Unavailable.REFUSED
    bench.ticks(200)
    bench.page.fault = None
    bench.ticks(5)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) < 12, lines
    assert any("no figures" in line for line in lines)
    assert any("figures come again" in line for line in lines)


def test_history_is_bounded_and_states_are_never_changed() -> None:
    bench = Bench()
    first = bench.ticks()
    for _ in range(MOST_HISTORY + 5):
        last = bench.loop.tick()
    assert len(last.history) == MOST_HISTORY
    assert last.ticks == MOST_HISTORY + 6
    assert len(first.history) == 1


def test_a_process_that_sleeps_while_it_decides_does_not_ask_for_what_it_decided_long_ago() -> None:
    bench = Bench().acting()
    bench.policy.sleep = lambda: bench.pass_time(60.0)
    state = bench.ticks()
    assert is_static(state.history[-1].asked)
    assert is_static(bench.engine.holds)
    assert is_static(bench.ticks(3).history[-1].asked), "and then comes a probation"
    assert not is_static(bench.ticks(5).history[-1].asked)


def test_a_process_that_sleeps_while_it_asks_begins_with_a_probation_at_the_next_tick() -> None:
    bench = Bench().acting()
    bench.port.stall_s = 60.0
    bench.ticks()
    assert is_static(bench.ticks(4).history[-1].asked)
    assert not is_static(bench.ticks(5).history[-1].asked)
