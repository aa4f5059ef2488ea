"""What every engine must keep; an engine's test inherits `EngineConformance` and names its factory.

class TestReplay(EngineConformance):
    def new(self) -> Engine: ...

`virtual` is for engines that compute their time: they repeat bit for bit, and they end. One in real
time has served before, so its clock and its versions do not begin at 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import astuple, replace
from typing import ClassVar

import numpy as np
import pytest

from trimtab.engine_bridge import limits
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine import Engine
from trimtab.engine_bridge.errors import AllocationError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry
from trimtab.envs.action import ActionMap

FOR_GOOD = float("inf")


class EngineConformance(ABC):
    """Inherit it, set `plan` and write `new`."""

    plan: ClassVar[Plan]
    virtual: ClassVar[bool] = True
    """Whether the engine computes its time: then it is deterministic, and comes to an end."""
    interval_s: ClassVar[float] = 2.0
    intervals: ClassVar[int] = 12
    """How far the tests drive an engine that does not end."""
    longest_step_s: ClassVar[float] = 0.5
    """How far the last step of an interval may run over its end."""

    @abstractmethod
    def new(self) -> Engine:
        """A fresh engine of `plan` with traffic for at least `intervals` intervals.

        One in real time stands at the beginning of an interval.
        """

    def same(self, one: Allocation, other: Allocation) -> bool:
        """Whether two allocations are the same; in real time versions count all changes ever."""
        if not self.virtual:
            one, other = replace(one, version=0), replace(other, version=0)
        return one == other

    def far(self, towards: float = 1.0) -> Allocation:
        """What no single interval may reach: every knob at the edge of the action's reach."""
        actions = ActionMap(self.plan)
        edge = np.where(np.arange(actions.size) % 2, towards, -towards)
        return actions.allocation(edge)

    def test_begins_on_the_static_plan(self) -> None:
        engine = self.new()
        assert self.same(engine.allocation, Allocation.static(self.plan))
        assert not engine.finished

    def test_apply_answers_what_holds(self) -> None:
        engine = self.new()
        for towards in (1.0, -1.0):
            answer = engine.apply(self.far(towards))
            assert answer == engine.allocation
            assert engine.advance(self.interval_s).applied == answer
            assert engine.allocation == answer

    def test_every_allocation_that_holds_is_lawful(self) -> None:
        engine, rng = self.new(), np.random.default_rng(3)
        actions = ActionMap(self.plan)
        before = engine.allocation
        for _ in range(self.intervals):
            asked = actions.allocation(rng.uniform(-1, 1, actions.size))
            now = engine.apply(asked)
            assert self.same(now, limits.project(asked, before, self.plan).allocation)
            assert engine.advance(self.interval_s).applied == now
            before = now

    def test_a_change_is_held_to_the_greatest_one(self) -> None:
        engine = self.new()
        assert not self.same(engine.apply(self.far()), self.far())

    def test_numbers_that_are_none_move_nothing(self) -> None:
        engine = self.new()
        static = Allocation.static(self.plan)
        nothing = replace(static, weights=(float("nan"),) * len(static.weights))
        assert engine.apply(nothing).weights == static.weights

    def test_an_allocation_of_another_plan_is_refused_and_changes_nothing(self) -> None:
        engine = self.new()
        held = engine.apply(self.far())
        with pytest.raises(AllocationError, match="weights"):
            engine.apply(replace(held, weights=(1.0,) * (len(self.plan.tiers) + 1)))
        assert engine.allocation == held

    def test_the_static_plan_is_back_at_once_when_asked_for(self) -> None:
        engine = self.new()
        for _ in range(3):
            engine.apply(self.far())
            engine.advance(self.interval_s)
        static = Allocation.static(self.plan)
        assert self.same(engine.apply(static), static)

    def test_a_lease_returns_to_the_static_plan_by_itself(self) -> None:
        engine, static = self.new(), Allocation.static(self.plan)
        engine.apply(self.far(), ttl_s=1.5 * self.interval_s)
        assert not self.same(engine.advance(self.interval_s).applied, static)
        assert self.same(engine.advance(self.interval_s).applied, static)
        assert self.same(engine.allocation, static)

    def test_the_usual_lease_is_the_plans(self) -> None:
        engine = self.new()
        engine.apply(self.far())
        leased = int(self.plan.controller.lease_s / self.interval_s)
        static = Allocation.static(self.plan)
        applied = [engine.advance(self.interval_s).applied for _ in range(leased + 1)]
        assert not any(self.same(held, static) for held in applied[: leased - 1])
        assert self.same(applied[-1], static)

    def test_a_renewed_lease_holds_on(self) -> None:
        engine = self.new()
        held = engine.apply(self.far(), ttl_s=1.5 * self.interval_s)
        for _ in range(self.intervals):
            engine.advance(self.interval_s)
            assert engine.apply(held, ttl_s=1.5 * self.interval_s) == held

    def test_telemetry_keeps_to_the_grid(self) -> None:
        engine = self.new()
        # An engine that has served before stands right behind a point of the grid.
        passed = 0 if self.virtual else engine.now_s // self.interval_s
        ends_s = [engine.advance(self.interval_s).time_s for _ in range(self.intervals)]
        due_s = self.interval_s * (passed + np.arange(1, self.intervals + 1))
        over_s = np.array(ends_s) - due_s
        assert (over_s >= -1e-9).all()
        assert (over_s < self.longest_step_s).all()
        assert engine.now_s == pytest.approx(ends_s[-1])

    def test_intervals_follow_each_other_without_a_hole(self) -> None:
        engine = self.new()
        before_s = engine.now_s
        for _ in range(self.intervals):
            seen = engine.advance(self.interval_s)
            assert seen.time_s - seen.interval_s == pytest.approx(before_s, abs=1e-6)
            before_s = seen.time_s

    def test_telemetry_is_of_the_plan_and_says_no_nonsense(self) -> None:
        engine = self.new()
        for _ in range(self.intervals):
            seen = engine.advance(self.interval_s)
            assert len(seen.tiers) == len(self.plan.tiers)
            assert 0 <= seen.busy_fraction <= 1
            assert 0 <= seen.kv_use_fraction <= 1
            assert seen.age_s >= 0
            for tier in seen.tiers:
                self.check_tier(tier)

    def check_tier(self, tier: TierTelemetry) -> None:
        assert tier.has_attainment == (tier.attainment_samples > 0)
        assert tier.met_tokens >= 0
        if tier.has_attainment:
            assert 0 <= tier.attainment <= 1
            assert (tier.met_tokens > 0) == (tier.attainment > 0)
        levels = (tier.queue_length, tier.running, tier.queued_prefill_tokens, tier.oldest_wait_s)
        assert min(levels) >= 0
        assert (tier.queue_length == 0) or (tier.oldest_wait_s > 0) or (tier.arrivals > 0)

    def run(self, engine: Engine, asked: Allocation | None) -> list[Telemetry]:
        """Interval after interval, with the same wish each time, until the engine's end."""
        seen = []
        while not engine.finished and len(seen) < 10_000:
            seen.append(engine.advance(self.interval_s))
            if asked is not None:
                engine.apply(asked)
        return seen

    def of_virtual_engines(self) -> None:
        if not self.virtual:
            pytest.skip("an engine in real time neither repeats nor ends")

    def test_is_deterministic(self) -> None:
        self.of_virtual_engines()
        first, second = (self.run(self.new(), self.far()) for _ in range(2))
        assert list(map(repr, first)) == list(map(repr, second))

    def test_a_zero_residual_is_the_static_plan_bit_for_bit(self) -> None:
        self.of_virtual_engines()
        actions = ActionMap(self.plan)
        zero = actions.allocation(np.zeros(actions.size))
        alone, asked = self.run(self.new(), None), self.run(self.new(), zero)
        assert list(map(repr, alone)) == list(map(repr, asked))
        assert astuple(asked[-1].applied) == astuple(Allocation.static(self.plan))

    def test_finished_stays_finished(self) -> None:
        self.of_virtual_engines()
        engine = self.new()
        self.run(engine, None)
        assert engine.finished
        engine.apply(self.far(), ttl_s=FOR_GOOD)
        for _ in range(3):
            seen = engine.advance(self.interval_s)
            assert engine.finished
            assert seen.steps == 0
            assert sum(tier.arrivals + tier.finished + tier.running for tier in seen.tiers) == 0

    def test_every_request_is_accounted_for(self) -> None:
        self.of_virtual_engines()
        seen = self.run(self.new(), self.far())
        for number in range(len(self.plan.tiers)):
            tiers = [interval.tiers[number] for interval in seen]
            arrived = sum(tier.arrivals for tier in tiers)
            assert sum(tier.attainment_samples for tier in tiers) == arrived
            assert sum(tier.finished + tier.refused for tier in tiers) == arrived
