"""Looks at an engine's allocation all the time, on its real control socket, and judges it.

It renews and proposes nothing. An allocation is lawful if the plan's limits lead to it from the one
before, or if it is the static plan.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.limits import Limits
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.vllm.control_client import ControlClient
from trimtab.engine_bridge.vllm.control_errors import ControlUnavailableError
from trimtab.engine_bridge.vllm.control_values import allocation_from

LOOK_S: Final = 0.05


@dataclass(frozen=True)
class Look:
    """What held at one moment."""

    at_s: float
    """Monotonic time."""
    allocation: Allocation
    """With its version."""
    static: bool
    leased: bool
    holder: str | None


class Watcher(threading.Thread):
    """Polls `get` every 50 ms until it is closed."""

    def __init__(self, path: Path, plan: Plan) -> None:
        """Watch the engine behind a socket."""
        super().__init__(daemon=True)
        self._path, self._plan = path, plan
        self._static = Allocation.static(plan)
        self._limits = Limits(plan)
        self._ended = threading.Event()
        self.looks: list[Look] = []

    def run(self) -> None:
        """Look."""
        with ControlClient(self._path, timeout_s=5) as control:
            while not self._ended.wait(LOOK_S):
                try:
                    self.looks.append(self._look(control.get()))
                except ControlUnavailableError:
                    continue  # An engine that is being restarted.

    def close(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join(10)

    @property
    def now(self) -> Look:
        """The last look."""
        return self.looks[-1]

    def since(self, from_s: float) -> list[Look]:
        """The looks from a time on."""
        return [look for look in self.looks if look.at_s >= from_s]

    def unlawful(self, from_s: float = 0.0) -> list[tuple[Look, Look]]:
        """Neighbours in time of which the second could not lawfully follow the first."""
        looks = self.since(from_s)
        return [pair for pair in pairwise(looks) if not self._follows(*pair)]

    def _look(self, answer: dict[str, Any]) -> Look:
        allocation = replace(
            allocation_from(answer["allocation"], self._static, self._plan),
            version=int(answer["version"]),
        )
        return Look(
            time.monotonic(),
            allocation,
            replace(allocation, version=0) == self._static,
            answer["state"] == "leased",
            answer["holder"],
        )

    def _follows(self, before: Look, after: Look) -> bool:
        changes = after.allocation.version - before.allocation.version
        if changes < 0:
            return after.static  # The engine was restarted.
        if changes == 0:
            return before.allocation == after.allocation
        if after.static:
            return True
        if not after.leased:
            return False
        reached = before.allocation
        for _ in range(changes):
            reached = self._limits.project(after.allocation, reached).allocation
        return reached == after.allocation
