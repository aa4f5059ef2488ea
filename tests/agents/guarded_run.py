"""A guard in a run whose every interval the test writes: the engine obeys unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.agents.guard import Guard
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.policy import Policy
from trimtab.agents.verdict import GuardMode, Verdict
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry

STATIC = Allocation.static(PLAN)
MOVED = replace(STATIC, prefill_budget_tokens=7000, weights=(9000.0, 90.0, 5.0, 1.0))
"""A proposal inside reach and slew."""
INTERVAL_S = PLAN.controller.interval_s


class Scripted(Policy):
    """Answers with what the test set."""

    name = "scripted"
    summary = "answers with what the test set"

    def __init__(self) -> None:
        self.answer: Callable[[Telemetry], object] = lambda seen: MOVED
        self.asked = 0

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        self.asked += 1
        return self.answer(telemetry)  # type: ignore[return-value]


class GuardedRun:
    """Feeds a guard interval by interval."""

    def __init__(self, mode: GuardMode = GuardMode.ACTIVE, **settings: object) -> None:
        self.policy = Scripted()
        self.guard = Guard(self.policy, GuardSettings(**settings), mode=mode)
        self.guard.reset(PLAN, 0)
        self.time_s = 0.0
        self.applied = STATIC
        self.verdict: Verdict | None = None

    def answer(self, proposal: object) -> None:
        self.policy.answer = lambda seen: proposal

    def fail(self) -> None:
        def fails(seen: Telemetry) -> object:
            raise ValueError("no such number")

        self.policy.answer = fails

    def tick(self, attainment: float = 1.0, **changes: object) -> Verdict:
        """One interval in which every tier attained this much of 40 requests."""
        self.time_s += INTERVAL_S
        tiers = [
            tier_telemetry(
                arrivals=40,
                attainment=attainment,
                attainment_samples=40,
                met_tokens=40_000.0 * attainment,
            )
            for _ in PLAN.tiers
        ]
        seen = telemetry(
            PLAN, **{"tiers": tiers, "time_s": self.time_s, "applied": self.applied, **changes}
        )
        self.verdict = self.guard.decide(seen)
        self.applied = self.verdict.apply
        return self.verdict

    def run_s(self, seconds: float, attainment: float = 1.0) -> Verdict:
        """Intervals for so long."""
        for _ in range(round(seconds / INTERVAL_S)):
            verdict = self.tick(attainment)
        return verdict

    def to_full_exposure(self) -> Verdict:
        """Past probation and ramp."""
        settings = self.guard.settings
        verdict = self.run_s(settings.probation_s + settings.ramp_s)
        assert verdict.exposure == 1.0
        return verdict
