"""The allocation that holds in an engine: who set it, until when, and how the scheduler gets it.

Server threads propose; the scheduler takes between two steps. All judging happens in the thread
that proposes, so that an idle engine answers at once and a step only swaps one object. It knows no
sockets (`control_server` does) and applies nothing to the scheduler.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.limits import Limited, project
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.vllm.control_errors import HeldError, ProposalError, StaleVersionError
from trimtab.engine_bridge.vllm.control_values import allocation_by_names, allocation_from

LONGEST_TTL_S: Final = 86_400.0
"""Longest lease, seconds."""
START_ID_BITS: Final = 48
"""Length of a start's number: a metric's value, which is a double, holds it whole."""
LONGEST_HOLDER: Final = 64
"""Longest name of a holder, characters."""

_LOG: Final = logging.getLogger("trimtab.control")
_LOG_EVERY_S: Final = 1.0


@dataclass(frozen=True, kw_only=True)
class Applied:
    """The answer to a proposal."""

    allocation: Allocation
    """What holds now; `allocation.version` is its version."""
    changed: bool
    """Whether it is another one than before; otherwise only the lease was renewed."""
    limited: tuple[Limited, ...]
    """What the plan's bounds changed of the proposal, knob by knob."""
    lease_left_s: float
    """Time to live, seconds; infinity: the static plan, for good."""

    @property
    def version(self) -> int:
        """Version of what holds."""
        return self.allocation.version


@dataclass(frozen=True, kw_only=True)
class ControlState:
    """What holds, for people and machines."""

    allocation: Allocation
    by_names: Mapping[str, object]
    """The allocation by the plan's names, as `control_values.allocation_by_names`."""
    leased: bool
    """False: the static plan holds."""
    holder: str | None
    """Who holds the lease."""
    lease_left_s: float
    """Time to live, seconds; infinity without a lease."""
    limited: tuple[Limited, ...]
    """What the last accepted proposal was changed by."""
    taken_version: int
    """Version that the scheduler works with: it lags while no step begins."""
    refused: int
    """Proposals refused since the start."""

    @property
    def version(self) -> int:
        """Version of what holds."""
        return self.allocation.version


@dataclass(frozen=True)
class _Holding:
    """One immutable state, so that a reader without a lock sees a whole one."""

    allocation: Allocation
    holder: str | None = None
    limited: tuple[Limited, ...] = ()


class AllocationStore:
    """Holds the allocation between a control server's threads and the scheduler's.

    Versions grow by one with each change, whoever makes it: a proposal, a release, the end of a
    lease. While one holder's lease is alive nobody else may propose.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        capacity_max_num_seqs: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        start_id: int | None = None,
    ) -> None:
        """Start on the static plan, version 0.

        Args:
            plan: Names, static shares, bounds and lease.
            capacity_max_num_seqs: Batch size that the engine was started for; None: the plan's.
            clock: Seconds that never go back; `take` must be given times of the same clock.
            start_id: Below 2^`START_ID_BITS`; None: drawn.
        """
        self.start_id = secrets.randbits(START_ID_BITS) if start_id is None else start_id
        """Number of this start of the engine, drawn by chance: control socket and metrics say the
        same one."""
        self._plan = plan
        self._capacity = capacity_max_num_seqs
        self._clock = clock
        self._static = Allocation.static(plan)
        self._lock = threading.Lock()
        self._now = _Holding(self._static)
        self._taken = self._static
        self._ends_s = math.inf
        self._refused = 0
        self._logged_s = -math.inf
        self._unlogged = 0

    @property
    def plan(self) -> Plan:
        """The plan whose names and bounds count."""
        return self._plan

    @property
    def allocation(self) -> Allocation:
        """What holds now, for the set-up; later changes come through `take`."""
        return self._now.allocation

    def take(self, now_s: float) -> Allocation | None:
        """Hand the scheduler a changed allocation, at the start of a step.

        It never waits: if a proposal is just being judged, its outcome is seen in the next step.
        Only one thread may call it.

        Args:
            now_s: The time, seconds of the store's clock.

        Returns:
            What holds from this step on, or None if nothing has changed since the last call.
        """
        if now_s >= self._ends_s and self._lock.acquire(blocking=False):
            try:
                self._end_lease(now_s)
            finally:
                self._lock.release()
        holds = self._now.allocation
        if holds is self._taken:
            return None
        self._taken = holds
        return holds

    def propose(
        self,
        values: Mapping[str, object],
        *,
        holder: str,
        ttl_s: float | None = None,
        expected_version: int | None = None,
    ) -> Applied:
        """Make some knobs hold, within the plan's bounds, and lease them.

        Args:
            values: By knob; a knob by tier, pool or class is a mapping of names (those left out
                keep their value) or a list of all. Knobs left out keep their value. An empty
                mapping renews the lease.
            holder: Who asks: 1 to `LONGEST_HOLDER` printable characters.
            ttl_s: Lease, seconds; None: the plan's `lease_intervals` intervals.
            expected_version: Refuse unless this version holds; None: whatever holds.

        Raises:
            ProposalError: it is no proposal, or a number is not finite; nothing has changed.
            HeldError: another holder's lease is alive.
            StaleVersionError: another version holds.
        """
        with self._lock:
            now_s = self._clock()
            self._end_lease(now_s)
            try:
                lease_s = self._lease_s(ttl_s)
                self._check_holder(holder, now_s)
                self._check_version(expected_version)
                proposed = allocation_from(values, self._now.allocation, self._plan)
            except ProposalError as error:
                self._note_refusal(error, now_s)
                raise
            return self._apply(proposed, holder, now_s, lease_s)

    def release(self, holder: str) -> Applied:
        """Give the lease back: the static plan holds at once. Without a lease nothing happens.

        Raises:
            ProposalError: the name is none.
            HeldError: the lease is somebody else's.
        """
        with self._lock:
            now_s = self._clock()
            self._end_lease(now_s)
            try:
                self._check_holder(holder, now_s)
            except ProposalError as error:
                self._note_refusal(error, now_s)
                raise
            before = self._now.allocation
            self._return_to_static(f"released by {holder}" if self._now.holder else None)
            return Applied(
                allocation=self._now.allocation,
                changed=self._now.allocation is not before,
                limited=(),
                lease_left_s=math.inf,
            )

    def describe(self) -> ControlState:
        """What holds now, who holds it and for how long."""
        with self._lock:
            now_s = self._clock()
            self._end_lease(now_s)
            holding = self._now
            return ControlState(
                allocation=holding.allocation,
                by_names=allocation_by_names(holding.allocation, self._plan),
                leased=holding.holder is not None,
                holder=holding.holder,
                lease_left_s=self._ends_s - now_s,
                limited=holding.limited,
                taken_version=self._taken.version,
                refused=self._refused,
            )

    def _apply(self, proposed: Allocation, holder: str, now_s: float, lease_s: float) -> Applied:
        before = self._now.allocation
        held = before
        limited: tuple[Limited, ...] = ()
        # What holds already is lawful: asking for it again only renews the lease.
        if proposed != before:
            projection = project(proposed, before, self._plan, capacity_max_num_seqs=self._capacity)
            held, limited = projection.allocation, projection.limited
        changed = held != before
        if changed:
            held = replace(held, version=before.version + 1)
            _LOG.info("version %d set by %s", held.version, holder)
        if limited:
            self._log_limited(holder, limited, now_s)
        # The lease first: a step must not see the new allocation with an old lease's end.
        self._ends_s = now_s + lease_s
        self._now = _Holding(held if changed else before, holder, limited)
        return Applied(
            allocation=self._now.allocation,
            changed=changed,
            limited=limited,
            lease_left_s=lease_s,
        )

    def _end_lease(self, now_s: float) -> None:
        if now_s >= self._ends_s:
            holder = self._now.holder
            self._return_to_static(f"the lease of {holder} has run out")

    def _return_to_static(self, why: str | None) -> None:
        before = self._now.allocation
        static = replace(self._static, version=before.version)
        static = before if static == before else replace(static, version=before.version + 1)
        self._now = _Holding(static)
        self._ends_s = math.inf
        if why is not None:
            _LOG.warning("%s: the static plan holds again, version %d", why, static.version)

    def _lease_s(self, ttl_s: object) -> float:
        if ttl_s is None:
            return self._plan.controller.lease_s
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float):
            raise ProposalError("control", key="ttl_s", value=ttl_s, bound="a number of seconds")
        if not 0 < ttl_s <= LONGEST_TTL_S:
            bound = f"above 0 and at most {LONGEST_TTL_S:g}"
            raise ProposalError("control", key="ttl_s", value=ttl_s, bound=bound)
        return float(ttl_s)

    def _check_holder(self, holder: object, now_s: float) -> None:
        if (
            not isinstance(holder, str)
            or not 0 < len(holder) <= LONGEST_HOLDER
            or not holder.isprintable()
        ):
            bound = f"a name of 1 to {LONGEST_HOLDER} printable characters"
            raise ProposalError("control", key="holder", value=holder, bound=bound)
        owner = self._now.holder
        if owner is not None and owner != holder:
            left_s = self._ends_s - now_s
            raise HeldError(
                "control",
                key="holder",
                value=holder,
                remedy=f"{owner} holds the lease for another {left_s:.1f} s; wait or release it",
            )

    def _check_version(self, expected: object) -> None:
        holds = self._now.allocation.version
        if expected is None:
            return
        if isinstance(expected, bool) or not isinstance(expected, int):
            raise ProposalError(
                "control", key="expected_version", value=expected, bound="a whole number"
            )
        if expected != holds:
            raise StaleVersionError(
                "control",
                key="expected_version",
                value=expected,
                bound=f"the version that holds, {holds}",
                remedy="get it and propose again",
            )

    def _note_refusal(self, error: ProposalError, now_s: float) -> None:
        self._refused += 1
        self._warn(now_s, "refused, version %d holds on: %s", self._now.allocation.version, error)

    def _log_limited(self, holder: str, limited: tuple[Limited, ...], now_s: float) -> None:
        words = ", ".join(f"{entry.knob} ({entry.reason})" for entry in limited)
        self._warn(now_s, "proposal of %s held to the plan's bounds: %s", holder, words)

    def _warn(self, now_s: float, text: str, *values: Any) -> None:
        # A client that sends nonsense in a loop must not fill the disk.
        if now_s - self._logged_s < _LOG_EVERY_S:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last line)" if self._unlogged else ""
        self._logged_s, self._unlogged = now_s, 0
        _LOG.warning(text + more, *values)
