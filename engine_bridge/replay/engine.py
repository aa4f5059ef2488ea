"""The replay engine: recorded traffic under the fair rules, or stock vLLM's, in virtual time.

An iteration-level simulation of vLLM V1 (continuous batching, chunked prefill, block-counted KV
cache with prefix reuse, preemption by recompute) driven by the step-time model. It runs no model
and reads no clock. The step loop is compiled (`loop`); this class is its door.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import ReplayError
from trimtab.engine_bridge.limits import Limits
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.build import build_state
from trimtab.engine_bridge.replay.handle import handle_of
from trimtab.engine_bridge.replay.layout import F8
from trimtab.engine_bridge.replay.loop import (
    advance,
    advance_intervals,
    advance_step,
    close_interval,
    settle_interval,
)
from trimtab.engine_bridge.replay.report import (
    ReplayResult,
    TelemetryLog,
    draft_counts,
    gap_bound_ms,
    request_columns,
)
from trimtab.engine_bridge.replay.settings import close_accounts, put_allocation
from trimtab.engine_bridge.replay.summary import COLUMNS, HEADS
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace

_MOST_AT_ONCE = 1024
"""Intervals that one call of the compiled loop sums up."""

RuleSet = Literal["fair", "fcfs", "priority"]


class ReplayEngine:
    """One engine replaying one trace.

    Drive it like a live engine: `apply` an allocation, `advance` an interval, read the telemetry.
    """

    def __init__(
        self,
        trace: Trace,
        plan: Plan,
        spec: EngineSpec,
        *,
        rules: RuleSet = "fair",
        collapse: bool = True,
        speed: float = 1.0,
        record_steps: bool = False,
    ) -> None:
        """Set the engine up before the first arrival, on the static plan.

        Args:
            trace: The traffic; its tiers must be the plan's.
            plan: Tiers, pools, limits and rule switches.
            spec: The engine's facts; limits that the plan states win.
            rules: `fair`, or stock vLLM's `fcfs` or `priority` (the plan's order of tiers).
            collapse: Run uneventful steps in a tight loop. The results are the same bit for bit.
            speed: True step time over the model's, to replay an engine that has drifted.
            record_steps: Keep what the last step carried, for `step`; goes without collapse only.

        Raises:
            TraceError: the trace does not fit the plan or the engine's block size.
            EngineSpecError: the engine's drafts do not fit its limits (`EngineSpec.check_draft`).
        """
        self._trace = trace
        self._plan = plan
        self._capacity = plan.engine.max_num_seqs or spec.max_num_seqs
        self._state = build_state(
            trace,
            plan,
            spec,
            rules=rules,
            collapse=collapse and not record_steps,
            speed=speed,
            record_steps=record_steps,
        )
        self._handle = handle_of(self._state)
        self._static = Allocation.static(plan)
        self._limits = Limits(plan, capacity_max_num_seqs=self._capacity)
        self._applied = self._static
        self._lease_ends_s = np.inf
        self._due_s = 0.0
        self._log = TelemetryLog()
        self._put_now(self._static)

    @property
    def allocation(self) -> Allocation:
        """The allocation that holds now."""
        return self._applied

    @property
    def now_s(self) -> float:
        """Virtual time, seconds from the start of the trace."""
        return float(self._state.engine[0].now_s)

    @property
    def due_s(self) -> float:
        """When the last interval was due to end; its last step may have run over, to `now_s`."""
        return self._due_s

    @property
    def finished(self) -> bool:
        """Whether every request has ended."""
        return bool(self._state.engine[0].left == 0)

    def apply(self, allocation: Allocation, *, ttl_s: float | None = None) -> Allocation:
        """Make an allocation hold, within the plan's bounds; answers with what holds now.

        Args:
            allocation: What is wished for.
            ttl_s: Lease: without another `apply` the static plan returns after it. None: the plan's
                `lease_intervals` control intervals; infinity: for good.

        Raises:
            AllocationError: it was made for another plan.
        """
        # What holds already is lawful: asking for it again only renews the lease.
        projected = self._applied
        if allocation != self._applied:
            projected = self._limits.project(allocation, self._applied).allocation
        controller = self._plan.controller
        lease_s = controller.lease_intervals * controller.interval_s if ttl_s is None else ttl_s
        self._lease_ends_s = self.now_s + lease_s
        self._put(projected)
        return projected

    def _put(self, allocation: Allocation) -> None:
        if allocation != self._applied:
            self._put_now(allocation)

    def _put_now(self, allocation: Allocation) -> None:
        close_accounts(self._handle)
        put_allocation(self._state, allocation, capacity=self._capacity)
        self._applied = allocation

    def advance(self, interval_s: float) -> Telemetry:
        """Run one interval (to the end of the step that passes its due end) and report it.

        Intervals are due one after the other: what the last step of one runs over is missing from
        the next, and does not add up.

        Raises:
            ReplayError: requests wait that nothing will ever admit: a fault of the rules.
        """
        e = self._state.engine[0]
        start_s, start_busy_ms = float(e.now_s), float(e.busy_ms)
        until_s = self._due_s = self._due_s + interval_s
        moving = True
        if self._lease_ends_s < until_s and self._applied != self._static:
            moving = advance(self._handle, self._lease_ends_s)
            self._put(self._static)
        moving = moving and advance(self._handle, until_s)
        tables, heads = self._tables(1)
        close_interval(self._handle, start_s, start_busy_ms, tables[0], heads[0])
        self._log.add(tables, heads, self._applied)
        if not moving:
            self._stuck()
        return self._log[-1]

    def step(self) -> dict[int, int]:
        """Run the next step that carries anything; empty when no request is left.

        A tool for comparing schedulers step by step, with `record_steps` only: it knows no
        intervals, so that neither leases end nor telemetry is taken in between.

        Returns:
            Scheduled tokens by row of the trace.

        Raises:
            ReplayError: as `advance`.
        """
        if not advance_step(self._handle):
            self._stuck()
        count = int(self._state.engine[0].step_rows)
        return {int(row): int(tokens) for row, tokens in self._state.step_log[:count]}

    def run(self, *, interval_s: float, until_s: float = np.inf) -> None:
        """Run interval after interval without a controller; the telemetry is in the result.

        The same as `advance` again and again under the static plan, or under an allocation whose
        lease does not end before `until_s`.

        Raises:
            ReplayError: as `advance`.
        """
        while not self.finished and self._due_s < until_s:
            if self._lease_ends_s < until_s and self._applied != self._static:
                self.advance(min(interval_s, until_s - self._due_s))
            else:
                self._run(interval_s, until_s)

    def _run(self, interval_s: float, until_s: float) -> None:
        tables, heads = self._tables(_MOST_AT_ONCE)
        count, self._due_s, moving = advance_intervals(
            self._handle, self._due_s, interval_s, until_s, tables, heads
        )
        self._log.add(tables[:count], heads[:count], self._applied)
        if not moving:
            self._stuck()

    def _tables(self, count: int) -> tuple[F8, F8]:
        return np.empty((count, len(self._plan.tiers), len(COLUMNS))), np.empty((count, len(HEADS)))

    def _stuck(self) -> None:
        e = self._state.engine[0]
        raise ReplayError(
            f"replay stuck at {float(e.now_s):.3f} s: {int(e.waiting)} requests wait, none runs"
            " and nothing is due"
        )

    def result(self) -> ReplayResult:
        """What became of every request so far."""
        e, tenants = self._state.engine[0], self._state.tenants
        settle_interval(self._handle)
        return ReplayResult(
            requests=request_columns(self._state, self._trace.tenant),
            telemetry=self._log,
            steps=int(e.step),
            engine_busy_s=float(e.busy_ms) * 1e-3,
            end_s=float(e.now_s),
            service_gap_ms=float(e.gap_ms),
            service_gap_bound_ms=gap_bound_ms(self._state),
            tenant_service_ms={
                (int(t.tier), n): float(t.service_ms) for n, t in enumerate(tenants)
            },
            encode_ms=self._state.req.encoded_ms.copy(),
            drafts=draft_counts(self._state),
        )
