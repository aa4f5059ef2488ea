"""What another policy would have asked for at the moments that an audit log recorded.

In open loop: it is shown the telemetry of the allocations that were applied, so nothing here says
how the tiers would have fared under it. No guard's memory takes part, only its reach and the plan's
limits: what is told is the wish at full exposure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.knob_entries import named_entries
from trimtab.agents.policy import Policy
from trimtab.agents.reach import distance, within_reach
from trimtab.engine_bridge import limits
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry


@dataclass(frozen=True, kw_only=True)
class KnobMeans:
    """One entry of the allocation, in the mean over the decisions."""

    static: float
    asked: float
    """What was asked for when it was recorded."""
    wished: float
    """What the other policy wished for; NaN if it never gave anything."""


@dataclass(frozen=True, kw_only=True)
class OpenLoopResult:
    """What one policy would have asked for."""

    policy: str
    decisions: int
    """Moments at which it was asked."""
    failed: int
    """Those of them at which it gave nothing that could be applied."""
    elsewhere: int
    """Those of them at which it wished for another allocation than was asked for."""
    distance_mean: float
    """How far from static its wishes were, in [0, 1] (`reach.distance`); NaN without any."""
    asked_distance_mean: float
    """How far from static was what was asked for at the same moments."""
    knobs: Mapping[str, KnobMeans]
    """By entry, for instance `weights.T0`."""


class OpenLoop:
    """Asks a policy, decision after decision, and adds up."""

    def __init__(
        self, label: str, policy: Policy, plan: Plan, settings: GuardSettings, seed: int
    ) -> None:
        """Begin.

        Args:
            label: What the policy is called.
            policy: It is reset here.
            plan: The plan of the record.
            settings: For the reach.
            seed: For the policy's `reset`.

        Raises:
            BundleError: the policy was trained for another plan.
        """
        policy.reset(plan, seed)
        self._label, self._policy, self._plan = label, policy, plan
        self._reach = settings.reach
        self._static = Allocation.static(plan)
        self._decisions = self._failed = self._elsewhere = 0
        self._distance = self._asked_distance = 0.0
        self._wished_sums = dict.fromkeys(named_entries(self._static, plan), 0.0)
        self._asked_sums = dict(self._wished_sums)

    def see(self, telemetry: Telemetry, asked: Allocation) -> None:
        """Ask the policy for one recorded decision.

        Args:
            telemetry: As recorded.
            asked: What the engine was asked for.
        """
        self._decisions += 1
        wish = self._wish(telemetry)
        if wish is None:
            self._failed += 1
            return
        self._elsewhere += any(
            one != other for one, other in zip(*self._entries(wish, asked), strict=True)
        )
        self._distance += distance(wish, self._static, self._reach)
        self._asked_distance += distance(asked, self._static, self._reach)
        for sums, allocation in ((self._wished_sums, wish), (self._asked_sums, asked)):
            for name, value in named_entries(allocation, self._plan).items():
                sums[name] += value

    def result(self) -> OpenLoopResult:
        """What came of it."""
        n = self._decisions - self._failed
        static = named_entries(self._static, self._plan)
        return OpenLoopResult(
            policy=self._label,
            decisions=self._decisions,
            failed=self._failed,
            elsewhere=self._elsewhere,
            distance_mean=_mean(self._distance, n),
            asked_distance_mean=_mean(self._asked_distance, n),
            knobs={
                name: KnobMeans(
                    static=value,
                    asked=_mean(self._asked_sums[name], n),
                    wished=_mean(self._wished_sums[name], n),
                )
                for name, value in static.items()
            },
        )

    def _wish(self, telemetry: Telemetry) -> Allocation | None:
        try:
            proposal = self._policy.act(telemetry)
            proposal.check_shape(self._plan)
            if not all(map(math.isfinite, named_entries(proposal, self._plan).values())):
                return None
        except Exception:
            # As behind the guard: whatever a policy raises is no answer.
            return None
        lawful = within_reach(proposal, self._static, self._reach)
        return limits.project(lawful, telemetry.applied, self._plan).allocation

    def _entries(self, *allocations: Allocation) -> list[list[float]]:
        return [list(named_entries(one, self._plan).values()) for one in allocations]


def _mean(total: float, n: int) -> float:
    return total / n if n else math.nan
