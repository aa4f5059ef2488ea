"""Entries and a guard for tests of the audit log: real ones, of a loop that the test plays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.agents.audit_entry import decision_entry, start_entry
from trimtab.agents.guard import Guard
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.memory import remember
from trimtab.agents.reactive import ReactivePolicy
from trimtab.agents.verdict import GuardMode
from trimtab.controller.daemon.audit_log import Audit
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan

STATIC = Allocation.static(PLAN)
SETTINGS = GuardSettings(probation_s=4.0, ramp_s=4.0)


@dataclass(kw_only=True)
class SampleLoop:
    """A guard over the reactive policy whose decisions go into a log."""

    audit: Audit
    engine: str = "a"
    plan: Plan = PLAN
    number: int = 0
    guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = Guard(ReactivePolicy(), SETTINGS, mode=GuardMode.ACTIVE)
        self.guard.reset(self.plan, 0)
        self.audit.begin(self.head)

    def head(self) -> Mapping[str, object]:
        return start_entry(
            unix_s=1.8e9 + self.number,
            engine=self.engine,
            plan=self.plan,
            policy="reactive",
            bundle_digest=None,
            settings=SETTINGS,
            mode=GuardMode.ACTIVE,
            seed=0,
            memory=remember(self.guard),
        )

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.number += 1
            tiers = [
                tier_telemetry(
                    arrivals=40,
                    attainment=(self.number * 7 % 100) / 100,
                    attainment_samples=40,
                    ttft_ms_p99=self.number / 3,
                )
                for _ in self.plan.tiers
            ]
            verdict = self.guard.decide(telemetry(self.plan, tiers, time_s=2.0 * self.number))
            self.audit.append(
                decision_entry(
                    number=self.number,
                    unix_s=1.8e9 + self.number,
                    static=STATIC,
                    telemetry=telemetry(self.plan, tiers, time_s=2.0 * self.number),
                    fresh=True,
                    verdict=verdict,
                    applied=verdict.apply,
                    contact="controlling",
                )
            )
