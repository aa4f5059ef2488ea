"""What a policy is: telemetry in, proposed allocation out.

The guard, the limits and the engine stand behind it; a policy never touches an engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import AllocationError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry

EngineRules = Literal["fair", "fcfs", "priority"]


class Policy(ABC):
    """A way to set the scheduler's knobs, called once a control interval.

    A subclass writes `_act`, and `_reset` if it remembers anything. Between `reset` and `reset` it
    is deterministic: equal telemetry in equal order gives equal allocations.
    """

    name: str
    """What the command line calls it."""
    summary: str
    """One line for people."""
    engine_rules: EngineRules = "fair"
    """The rules that the engine must run under it."""
    outside_fraction: float = 0.0
    """Part of what it saw last that lies outside of what it was trained on, in [0, 1]."""

    _plan: Plan | None = None

    @final
    def reset(self, plan: Plan, seed: int) -> None:
        """Forget everything and begin a run.

        Args:
            plan: bounds, targets and the static shares.
            seed: for policies that draw random numbers.
        """
        self._plan = plan
        self._reset(plan, seed)

    @final
    def act(self, telemetry: Telemetry) -> Allocation:
        """Propose the allocation for the next interval.

        Raises:
            AllocationError: the telemetry has other tiers than the plan.
        """
        if self._plan is None:
            raise RuntimeError(f"policy {self.name}: reset(plan, seed) comes before act(telemetry)")
        if len(telemetry.tiers) != len(self._plan.tiers):
            raise AllocationError(
                f"telemetry at {telemetry.time_s:g} s",
                key="tiers",
                value=len(telemetry.tiers),
                bound=f"{len(self._plan.tiers)}, as in the plan",
            )
        return self._act(telemetry, self._plan)

    def _reset(self, plan: Plan, seed: int) -> None:  # noqa: B027 - nothing to forget by default
        """Forget what the subclass remembers."""

    @abstractmethod
    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        """Propose; the telemetry has the plan's tiers, and any figure may be NaN (no data)."""
