"""Days of a controller in virtual time, with everything around it failing at random.

After every step of the engine what it keeps to is lawful, and static once nobody has spoken to it
for the length of a lease. What the loop asks for stays inside the guard's reach, begins with a
probation whenever the engine was not its own, and comes back by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.virtual_deployment import HANGS_S, SPEC, Page, Port, VirtualClock, VirtualEngine
from trimtab.agents.audit_read import read_audit
from trimtab.agents.bundle import read_bundle
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.learned import LearnedPolicy
from trimtab.agents.policy import Policy
from trimtab.agents.reach import within_reach
from trimtab.agents.registry import SHIPPED_BUNDLE
from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon.audit_log import Audit, AuditLog, NoAudit
from trimtab.controller.daemon.bundle_watch import Offer
from trimtab.controller.daemon.command import Command, CommandKind
from trimtab.controller.daemon.loop import EngineLoop
from trimtab.controller.daemon.policy_deadline import PolicyWithDeadline
from trimtab.controller.daemon.state import Contact
from trimtab.engine_bridge import limits
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.live.live_engine import LiveEngine
from trimtab.engine_bridge.live.snapshot import Unavailable
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.generate import generate
from trimtab.training.whatif.audit_policies import RecordedPolicies
from trimtab.training.whatif.audit_replay import replay

PLAN = with_values(load_plan(), {"controller.interval_s": 5.0})
"""An interval that is not the shipped one, and makes a day shorter."""
STATIC = Allocation.static(PLAN)
INTERVAL_S = float(PLAN.controller.interval_s)
LEASE_S = float(PLAN.controller.lease_s)
GUARD = GuardSettings(probation_s=60.0, ramp_s=30.0, cool_down_s=60.0, most_trips=9)
STEP_S = 2.0
TICK_AT_S = 0.37
"""A tick comes so long after a step of the engine."""
LONGEST_TICK_S = 3 * HANGS_S
"""Figures, a question and a request to a control socket, each of which hangs."""
RIVAL = "rival"


@cache
def traffic() -> Trace:
    """A light hour, which comes again and again."""
    return generate(hours=1.0, seed=5, preset="bursty", load=0.3, spec=SPEC)


class Moody(Policy):
    """The shipped policy, with moods."""

    name = "learned"
    summary = "the shipped policy, with moods"

    def __init__(self) -> None:
        self.policy = LearnedPolicy(read_bundle(SHIPPED_BUNDLE))
        self.mood = ""
        self.stall: Callable[[], None] | None = None

    def _reset(self, plan: Plan, seed: int) -> None:
        self.policy.reset(plan, seed)

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        answer = self.policy.act(telemetry)
        if self.stall is not None:
            self.stall()
        match self.mood:
            case "raises":
                raise ZeroDivisionError("the policy has a fault")
            case "not a number":
                return replace(answer, weights=(math.nan,) * len(answer.weights))
            case "huge":
                return replace(answer, weights=(1e300,) * 4, prefill_budget_tokens=10**9)
            case "upside down":
                return replace(answer, weights=answer.weights[::-1], kv_fractions=(0.0, 0.0, 1.0))
            case "another shape":
                return replace(answer, weights=())
        return answer


class Offers:
    """A `PolicySource` whose bundle changes when it is told to."""

    name = "learned"

    def __init__(self) -> None:
        self.error = ""
        self.policy = Moody()
        self._waiting: Offer | None = None

    def first(self) -> Offer:
        self._waiting = None
        policy = PolicyWithDeadline(self.policy, deadline_s=0.0, threaded=False)
        policy.reset(PLAN, 0)
        return Offer(policy=policy, bundle_digest=self.policy.policy.bundle.digest)

    def change(self) -> None:
        mood, self.policy = self.policy.mood, Moody()
        self.policy.mood = mood
        self._waiting = self.first()

    def newer(self) -> Offer | None:
        waiting, self._waiting = self._waiting, None
        return waiting

    def reload(self) -> None:
        self.error = ""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong for a while."""

    kind: str
    mean_s: float
    """How long it lasts on average; 0: it only happens."""
    often: float = 1.0
    """How often, against the others."""


FAULTS = (
    *(Fault(f"source {reason}", 25.0) for reason in Unavailable),
    Fault("source not a number", 25.0),
    Fault("source gauges gone", 25.0),
    Fault("source frozen", 30.0),
    Fault("source late", 30.0),
    *(Fault(f"control {how}", 20.0) for how in ("down", "hung", "garbage", "refused", "unheard")),
    *(Fault(f"policy {how}", 40.0)
      for how in ("raises", "not a number", "huge", "upside down", "another shape")),
    Fault("engine restarts", 0.0),
    Fault("rival", 40.0),
    Fault("daemon killed", 20.0),
    Fault("daemon stopped", 20.0),
    Fault("daemon paused", 30.0),
    Fault("daemon paused while it decides", 0.0),
    Fault("daemon paused while it asks", 0.0),
    Fault("wall clock jumps", 0.0),
    Fault("bundle changes", 0.0),
    Fault("order", 0.0, often=6.0),
)  # fmt: skip

INVENTED = tuple(
    f"policy {how}" for how in ("not a number", "huge", "upside down", "another shape")
)
"""Answers that only this test's policy gives: the policy of the record would answer otherwise."""


class Day:
    """One engine, one controller, and a schedule of faults drawn from a seed."""

    def __init__(
        self,
        seed: int,
        *,
        every_s: float,
        page: bool = False,
        audit: Audit | None = None,
        without: Sequence[str] = (),
    ) -> None:
        """Prepare.

        Args:
            seed: Of the faults.
            every_s: Mean time between two faults of one kind.
            page: Read the figures off a real page of metrics.
            audit: Takes the decisions.
            without: Kinds of faults that do not happen.
        """
        self.rng = np.random.default_rng(seed)
        self.clock = VirtualClock()
        self.engine = VirtualEngine(PLAN, traffic(), self.clock, observe=self.changed, page=page)
        self.page, self.port = Page(self.engine), Port(self.engine)
        self.offers, self.audit = Offers(), audit or NoAudit()
        self.paused = False
        self.stalled_s = 0.0
        self.active: Counter[str] = Counter()
        self.calm_since_s = self.foreign_s = 0.0
        self.starts = self.changes = self.acted = self.ticks = 0
        self.contacts: Counter[Contact] = Counter()
        self.modes: Counter[GuardMode] = Counter()
        self.happened: Counter[str] = Counter()
        self.due = {
            fault: self.rng.exponential(every_s / fault.often)
            for fault in FAULTS
            if fault.kind not in without
        }
        self.ends: dict[Fault, float] = {}
        self.every_s = every_s
        self.loop: EngineLoop | None = self.new_loop()

    def new_loop(self) -> EngineLoop:
        """As a new process would make it: another name, and no memory."""
        self.starts += 1
        self.holder = f"trimtab@virtual:{self.starts}"
        live = LiveEngine(
            PLAN, self.page, self.port, holder=self.holder, threaded=False,
            monotonic_s=self.clock.monotonic_s, unix_s=self.clock.unix_s,
        )  # fmt: skip
        return EngineLoop(
            "a", live, self.offers, self.audit, holder=self.holder, settings=GUARD,
            mode=GuardMode.ACTIVE, monotonic_s=self.clock.monotonic_s, unix_s=self.clock.unix_s,
        )  # fmt: skip

    def run(self, hours: float) -> None:
        """Live through it, and hold everything to what must always be so."""
        until_s, tick_s, stepped_s = hours * 3600.0, 0.0, 0.0
        while self.clock.now_s < until_s:
            self.clock.now_s = math.floor(self.clock.now_s) + STEP_S
            self.engine.step(self.clock.now_s - stepped_s)
            stepped_s = self.clock.now_s
            self.static_without_contact()
            self.let_things_happen()
            if self.clock.now_s < tick_s:
                continue
            tick_s = self.clock.now_s + INTERVAL_S
            if self.loop is not None and not self.paused:
                self.clock.now_s += TICK_AT_S
                self.tick(self.loop)

    def tick(self, loop: EngineLoop) -> None:
        before_s, described = self.clock.now_s, self.engine.store.describe()
        holds = self.engine.holds
        while_asking_s, self.stalled_s = self.port.stall_s, 0.0
        state = loop.tick()
        assert state.faults == 0, state.detail
        stalled_s = self.stalled_s + while_asking_s - self.port.stall_s
        assert self.clock.now_s - before_s - stalled_s <= LONGEST_TICK_S + 1e-6
        decision = state.history[-1]
        if described.holder != self.holder:
            self.foreign_s = before_s
        if described.holder not in (None, self.holder):
            assert self.engine.holds is holds, "changed what another one holds"
        self.inside_the_reach(decision.asked)
        if before_s < self.foreign_s + GUARD.probation_s - INTERVAL_S:
            assert replace(decision.asked, version=0) == STATIC, "no probation"
        if state.age_s > GUARD.static_after_intervals * INTERVAL_S:
            assert replace(decision.asked, version=0) == STATIC, "acted on old figures"
        if described.holder == self.holder and self.port.found_free_s >= before_s:
            # The process was stopped for too long in the middle of the tick.
            static = replace(decision.asked, version=0) == STATIC
            assert static or while_asking_s > 0, "asked for what was decided long ago"
            self.foreign_s = self.clock.now_s
        self.comes_back(before_s, state.contact)
        self.ticks += 1
        self.acted += decision.asked != STATIC
        self.contacts[state.contact] += 1
        self.modes[state.mode] += 1

    def changed(self, before: Allocation, after: Allocation) -> None:
        """Every change of what holds leads to where one interval may lead."""
        self.changes += 1
        held = limits.project(after, before, PLAN, capacity_max_num_seqs=SPEC.max_num_seqs)
        assert held.allocation == after, f"unlawful: {held.limited}"

    def static_without_contact(self) -> None:
        """Nobody has spoken to the engine for a lease: it keeps to the static plan."""
        if self.clock.now_s >= self.port.set_s + LEASE_S:
            assert replace(self.engine.holds, version=0) == STATIC, "no contact, and not static"

    def inside_the_reach(self, asked: Allocation) -> None:
        assert within_reach(asked, STATIC, GUARD.reach) == asked

    def comes_back(self, now_s: float, contact: Contact) -> None:
        """When nothing has been wrong for a while, the engine is steered again."""
        if self.active:
            self.calm_since_s = now_s
        if now_s > self.calm_since_s + LEASE_S + 4 * INTERVAL_S:
            assert contact is Contact.CONTROLLING, f"{contact} long after the last fault"
            assert self.engine.store.describe().holder == self.holder

    def let_things_happen(self) -> None:
        now_s = self.clock.now_s
        for fault, end_s in list(self.ends.items()):
            if now_s >= end_s:
                del self.ends[fault]
                self.active -= Counter([fault.kind])
                self.put(fault.kind, False)
                self.calm_since_s = now_s
        for fault, due_s in self.due.items():
            if now_s < due_s:
                continue
            self.due[fault] = now_s + self.rng.exponential(self.every_s / fault.often)
            if fault in self.ends:
                continue
            self.happened[fault.kind] += 1
            self.calm_since_s = now_s
            self.put(fault.kind, True)
            if fault.mean_s:
                self.active[fault.kind] += 1
                self.ends[fault] = now_s + 1.0 + self.rng.exponential(fault.mean_s)
        if "rival" in self.active:
            self.rival_asks()

    def put(self, kind: str, on: bool) -> None:
        """Let a fault begin or end."""
        what, _, how = kind.partition(" ")
        match what:
            case "source":
                self.put_source(how, on)
            case "control":
                self.port.fault = how if on else ""
            case "policy":
                self.offers.policy.mood = how if on else ""
            case "daemon":
                self.put_daemon(how, on)
            case "engine":
                self.engine.restart()
            case "wall":
                self.clock.wall_off_s += float(self.rng.choice([-86_400.0, -61.0, 3.0, 3600.0]))
            case "bundle":
                self.offers.change()
            case "order" if self.loop is not None:
                self.loop.command(self.order())

    def put_source(self, how: str, on: bool) -> None:
        match how:
            case "not a number":
                self.page.spoil = partial(spoil_counter, value=math.nan) if on else None
            case "gauges gone":
                self.page.spoil = without_gauges if on else None
            case "frozen":
                self.page.frozen = on
            case "late":
                self.page.delay_s = float(self.rng.uniform(1.0, 15.0)) if on else 0.0
            case _:
                self.page.fault = Unavailable(how) if on else None

    def put_daemon(self, how: str, on: bool) -> None:
        if how == "paused":
            self.paused = on
        elif how == "paused while it decides":
            self.offers.policy.stall = self.stall
        elif how == "paused while it asks":
            self.port.stall_s = self.rng.exponential(2 * LEASE_S)
        elif not on and self.loop is None:
            self.loop = self.new_loop()
        elif on and self.loop is not None:
            if how == "stopped":
                self.loop.close()
            self.loop = None

    def stall(self) -> None:
        """The process is stopped in the middle of a decision, once."""
        self.offers.policy.stall = None
        self.stalled_s = self.rng.exponential(2 * LEASE_S)
        self.clock.now_s += self.stalled_s

    def order(self) -> Command:
        kinds = (CommandKind.RELEASE, CommandKind.HOLD, CommandKind.RELOAD, CommandKind.MODE)
        kind = kinds[self.rng.choice(4, p=[0.5, 0.1, 0.1, 0.3])]
        modes = (GuardMode.ACTIVE, GuardMode.CANARY, GuardMode.SHADOW, GuardMode.STATIC)
        mode = modes[self.rng.choice(4, p=[0.7, 0.1, 0.1, 0.1])]
        return Command(kind=kind, mode=mode if kind is CommandKind.MODE else None, by="test")

    def rival_asks(self) -> None:
        """Another controller, whose values are wild, takes the engine when it is free."""
        values = {"weights": [float(w) for w in 10.0 ** self.rng.uniform(-3, 6, 4)]}
        request = {"op": "set", "holder": RIVAL, "values": values}
        if self.engine.store.describe().holder in (None, RIVAL):
            self.engine.answers.answer(request)
            self.port.set_s = self.clock.now_s
            self.engine.look()


def spoil_counter(values: dict[str, dict[str, float]], *, value: float) -> None:
    values["arrivals_total"] = dict.fromkeys(values["arrivals_total"], value)


def without_gauges(values: dict[str, dict[str, float]]) -> None:
    for name in [name for name in values if name.startswith("allocation_")]:
        del values[name]


def test_a_day_in_which_everything_fails_at_random() -> None:
    day = Day(seed=20261130, every_s=5400.0)
    day.run(24.0)
    assert set(day.happened) == {fault.kind for fault in FAULTS}
    assert {Contact.CONTROLLING, Contact.NO_TELEMETRY, Contact.NO_CONTROL, Contact.STANDBY} <= set(
        day.contacts
    )
    assert len(day.modes) >= 4
    assert day.acted > day.ticks / 10, f"the policy acted in {day.acted} of {day.ticks} ticks"
    assert day.starts > 10
    assert day.engine.restarts > 5


@given(seed=st.integers(0, 2**32 - 1), every_s=st.sampled_from([120.0, 600.0]))
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
def test_an_hour_in_which_everything_fails_more_often(seed: int, every_s: float) -> None:
    Day(seed, every_s=every_s).run(0.5)


@pytest.mark.parametrize("seed", [3, 4])
def test_what_is_recorded_of_a_bad_hour_is_decided_the_same_again(
    tmp_path: Path, seed: int
) -> None:
    log = AuditLog(tmp_path, engine="a", most_bytes=1 << 20, threaded=False)
    day = Day(seed, every_s=400.0, audit=log, without=INVENTED)
    day.run(1.0)
    log.close()
    runs = read_audit([tmp_path])
    replays = [replay(run, RecordedPolicies()) for run in runs]
    assert [found.difference for found in replays] == [None] * len(runs)
    assert sum(found.equal for found in replays) > day.ticks / 4
    assert sum(found.skipped for found in replays) == 0
    assert sum(found.policy_errors for found in replays) > 0


@pytest.mark.parametrize("seed", [1, 2])
def test_a_quarter_of_an_hour_off_a_real_page_of_metrics(seed: int) -> None:
    Day(seed, every_s=300.0, page=True).run(0.25)
