"""One engine of a replayed fleet: a replay that is offered its requests one by one.

It holds the fleet's whole trace and serves of it what it is offered. Sessions are the fleet's
business: it only says who has ended. A request in slices is offered by its first one, and counts as
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.replay.handle import handle_of
from trimtab.engine_bridge.replay.layout import DONE, NONE
from trimtab.engine_bridge.replay.loop import advance, close_interval
from trimtab.engine_bridge.replay.offers import fill, found_blocks, offer
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace

Control = Callable[[Telemetry], Allocation]
"""What acts once a control interval."""


class Ended(NamedTuple):
    """A request that is over."""

    row: int
    at_s: float
    outcome: int
    """As in `ReplayResult.requests`."""


class Member(ReplayEngine):
    """An engine that starts empty at a time and is told of each request as it comes."""

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        spec: EngineSpec,
        *,
        rules: RuleSet,
        control: Control,
        start_s: float = 0.0,
    ) -> None:
        """Start it, with nothing in its cache.

        Args:
            trace: The traffic of the whole fleet.
            plan: Tiers, pools, limits and rule switches.
            spec: The engine's facts.
            rules: As for `ReplayEngine`.
            control: Told of each interval; answers with the allocation for the next.
            start_s: When it starts, seconds.
        """
        super().__init__(trace, plan, spec, rules=rules)
        self._state.req.successor[self._state.req.slice == NONE] = NONE
        self._state = self._state._replace(open_rows=np.zeros(0, np.int64))
        self._handle = handle_of(self._state)
        e = self._state.engine[0]
        e.left = 0
        e.now_s = e.began_s = start_s
        self._due_s = start_s
        self._start = (start_s, 0.0)
        self._control = control
        self._told = 0
        self._offered: set[int] = set()

    @property
    def in_flight(self) -> int:
        """Requests that it was offered and that are not over."""
        return int(self._state.engine[0].left)

    @property
    def busy_s(self) -> float:
        """Time in which a step ran, seconds."""
        return float(self._state.engine[0].busy_ms) * 1e-3

    def offer(self, row: int, at_s: float) -> None:
        """A request of the trace arrives at that time; a step under way does not see it.

        Args:
            row: The request, or its first slice.
            at_s: When, seconds.
        """
        offer(self._handle, row, at_s)
        while self._state.req[row].slice != NONE:
            row += 1
        self._offered.add(row)

    @property
    def read_slices(self) -> npt.NDArray[np.int32]:
        """By row, whether its gateway believes a slice to be cached."""
        return np.array(self._state.req.read)

    @read_slices.setter
    def read_slices(self, known: npt.NDArray[np.int32]) -> None:
        self._state.req.read[:] = known

    def cached_blocks(self, row: int) -> int:
        """Leading blocks of a prompt that its cache holds now."""
        return int(found_blocks(self._handle, row))

    def fill(self, row: int, blocks: int) -> int:
        """Bring the leading blocks of a prompt into the cache; how many were brought in."""
        return int(fill(self._handle, row, blocks))

    def run_until(self, until_s: float) -> list[Ended]:
        """Run to the end of the step that passes `until_s`; who has ended since the last call.

        Raises:
            ReplayError: requests wait that nothing will ever admit: a fault of the rules.
        """
        interval_s = self._plan.controller.interval_s
        ended: list[Ended] = []
        while self._due_s + interval_s <= until_s:
            self._due_s += interval_s
            self._run_to(self._due_s)
            ended += self._news()
            self._close()
        self._run_to(until_s)
        ended += self._news()
        return ended

    def _run_to(self, until_s: float) -> None:
        if not advance(self._handle, until_s):
            self._stuck()
        e = self._state.engine[0]
        if e.left == 0 and e.now_s < until_s:
            e.now_s = e.began_s = until_s

    def _close(self) -> None:
        tables, heads = self._tables(1)
        close_interval(self._handle, *self._start, tables[0], heads[0])
        e = self._state.engine[0]
        self._start = (float(e.now_s), float(e.busy_ms))
        self._told = 0
        self._log.add(tables, heads, self._applied)
        self.apply(self._control(self._log[-1]), ttl_s=self._plan.controller.lease_s)

    def _news(self) -> list[Ended]:
        s = self._state
        count = int(s.engine[0].dones)
        rows = s.done_log[self._told : count]
        rows = rows[s.req.slice[rows] == NONE].tolist()
        self._told = count
        self._offered.difference_update(rows)
        return [Ended(row, float(s.req[row].last_s), int(s.req[row].outcome)) for row in rows]

    def unfinished(self) -> dict[int, bool]:
        """Rows that it was offered and that are not over: whether their first token is out."""
        return {
            row: bool(np.isfinite(self._state.req[row].first_s))
            for row in sorted(self._offered)
            if self._state.req[row].status != DONE
        }
