"""The policy that never moves: the plan's static shares under the fair scheduler."""

from __future__ import annotations

from trimtab.agents.policy import Policy
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry


class StaticPolicy(Policy):
    """Always the plan's static allocation: the fall-back, and what others are measured against."""

    name = "static"
    summary = "the plan's static shares under the fair scheduler"

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        return Allocation.static(plan)
