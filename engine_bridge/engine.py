"""What an engine is to whoever controls it: it takes an allocation and reports telemetry.

The replay keeps to it in virtual time, a live engine in real time. The environment and the daemon
know engines only by it. How an engine schedules is not its matter.
"""

from __future__ import annotations

from typing import Protocol

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.telemetry import Telemetry


class Engine(Protocol):
    """One engine under control; tests/conformance/engine_conformance.py says how it must behave."""

    @property
    def allocation(self) -> Allocation:
        """The allocation that holds now."""

    @property
    def now_s(self) -> float:
        """Time of the engine, seconds from the start of the run."""

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do; a live engine never is."""

    def apply(self, allocation: Allocation, *, ttl_s: float | None = None) -> Allocation:
        """Make an allocation hold, within the plan's bounds; answers with what holds now.

        Args:
            allocation: What is wished for.
            ttl_s: Lease: without another `apply` the static plan returns after it. None: the plan's
                `lease_intervals` control intervals; infinity: for good.

        Raises:
            AllocationError: it was made for another plan.
        """

    def advance(self, interval_s: float) -> Telemetry:
        """Let the engine work until the control interval ends, and report the interval.

        Intervals follow each other on a grid: where the last step of one runs over its end, the
        next one is that much shorter.
        """
