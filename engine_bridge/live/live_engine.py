"""A running vLLM as an `Engine`: metrics in, control socket out, in real time.

Nothing that the world does to it makes `poll` raise or wait for longer than it says. It decides
nothing, retries nothing behind the caller's back and holds no lease alive by itself.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.live.assemble import Assembler, Taken
from trimtab.engine_bridge.live.background import BackgroundReader, InlineReader, Reader, Seen
from trimtab.engine_bridge.live.data_age import DataAge
from trimtab.engine_bridge.live.reading import ControlView, Notice, NoticeKind, Reading
from trimtab.engine_bridge.live.snapshot import (
    MetricSource,
    TelemetryUnavailableError,
    Unavailable,
)
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm.control_errors import (
    ControlRefusedError,
    ControlUnavailableError,
    ProposalError,
)
from trimtab.engine_bridge.vllm.control_store import LONGEST_TTL_S
from trimtab.engine_bridge.vllm.control_values import allocation_by_names, allocation_from
from trimtab.engine_bridge.vllm.metric_families import START_ID

__all__ = ["ControlPort", "ControlView", "LiveEngine", "Notice", "NoticeKind", "Reading"]

_LOOKS: Final = 20
"""So many times an interval `advance` looks whether the next one has ended."""
_LONGEST_LOOK_S: Final = 0.1
_PATIENCE: Final = 3.0
"""So many intervals `advance` waits for one."""


class ControlPort(Protocol):
    """An engine's control socket, as `ControlClient` speaks to it: each call is bounded."""

    def get(self) -> Mapping[str, Any]:
        """What holds."""

    def set(
        self,
        values: Mapping[str, object],
        *,
        holder: str,
        ttl_s: float | None = None,
        expected_version: int | None = None,
    ) -> Mapping[str, Any]:
        """Make knobs hold and lease them."""

    def release(self, holder: str) -> Mapping[str, Any]:
        """Give the lease back."""

    def health(self) -> Mapping[str, Any]:
        """The engine's own facts."""

    def close(self) -> None:
        """Close the connection."""


class LiveEngine:
    """One engine. Not safe for several threads at once."""

    def __init__(
        self,
        plan: Plan,
        source: MetricSource,
        control: ControlPort,
        *,
        holder: str,
        read_deadline_s: float = 1.0,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
        wait: Callable[[float], object] = time.sleep,
        threaded: bool = True,
    ) -> None:
        """Say where the engine is; nothing is read or opened yet.

        Args:
            plan: Whose tiers, pools and bounds count; the engine must run the same one.
            source: Where its metrics are read.
            control: Its control socket.
            holder: The name that leases are taken under.
            read_deadline_s: Longest that a look waits for the metrics, seconds.
            monotonic_s: Seconds that never go back.
            unix_s: Seconds since 1970; a jump of it changes nothing but a notice.
            wait: Waits for so many seconds (`advance`).
            threaded: Read the source in a thread, so that one that hangs costs no more than the
                deadline; False reads it here, for virtual time.
        """
        self.plan = plan
        self._control, self._holder = control, holder
        self._deadline_s, self._monotonic_s, self._wait = read_deadline_s, monotonic_s, wait
        reader = BackgroundReader if threaded else InlineReader
        self._reader: Reader = reader(source, monotonic_s)
        self._assembler = Assembler(plan)
        self._age = DataAge(plan.controller.interval_s, unix_s)
        self._static = Allocation.static(plan)
        self._allocation = self._static
        self._lease_ends_s = -math.inf

    @property
    def place(self) -> str:
        """Where the metrics are read, for people."""
        return self._reader.place

    @property
    def allocation(self) -> Allocation:
        """What holds, as the engine said last."""
        return self._allocation

    @property
    def now_s(self) -> float:
        """The engine's time at the end of the last interval, seconds; NaN before the first look."""
        return self._assembler.time_s

    @property
    def finished(self) -> bool:
        """Never: there may always be more to serve."""
        return False

    @property
    def lease_left_s(self) -> float:
        """Time until our lease ends, seconds, as far as it is known; 0 without one."""
        return max(0.0, self._lease_ends_s - self._monotonic_s())

    def poll(self) -> Reading:
        """Look once: the newest figures and what holds.

        It takes at most `read_deadline_s`, or the control's own time-out where that is longer.
        """
        return self._look(-math.inf)

    def apply(self, allocation: Allocation, *, ttl_s: float | None = None) -> Allocation:
        """Ask for an allocation, or renew its lease; answers with what holds now.

        Entries that are no finite number are left as they are.

        Args:
            allocation: What is wished for.
            ttl_s: Lease, seconds; None: the plan's.

        Raises:
            AllocationError: it was made for another plan.
            ControlUnavailableError: no answer; whether it holds is not known.
            ControlRefusedError: the engine keeps what it has, for instance because another
                controller holds the lease.
        """
        allocation.check_shape(self.plan)
        lease_s = self.plan.controller.lease_s if ttl_s is None else min(ttl_s, LONGEST_TTL_S)
        asked_s = self._monotonic_s()
        answer = self._control.set(
            _plain(allocation_by_names(allocation, self.plan)), holder=self._holder, ttl_s=lease_s
        )
        try:
            held = allocation_from(answer["allocation"], self._static, self.plan)
            self._allocation = replace(held, version=int(answer["version"]))
        except (KeyError, TypeError, ValueError, OverflowError, ProposalError) as error:
            raise _unlike(error) from error
        # From before it was asked: our idea of the lease must never outlast the engine's.
        self._lease_ends_s = asked_s + lease_s
        return self._allocation

    def advance(self, interval_s: float) -> Telemetry:
        """Wait until an interval of this length ends on the grid of the engine's time.

        Raises:
            TelemetryUnavailableError: none did within three intervals, or no figures come.
        """
        began_s = self._monotonic_s()
        look_s = min(interval_s / _LOOKS, _LONGEST_LOOK_S)
        pause_s = self._due_s(interval_s) - self.now_s - self._age.at(began_s)
        while True:
            # Before the first look nothing is known of the grid, and the pause is no number.
            self._wait(pause_s if pause_s > look_s else look_s)
            pause_s = 0.0
            reading = self._look(self._due_s(interval_s))
            if reading.fresh and reading.telemetry is not None:
                return reading.telemetry
            if self._monotonic_s() - began_s > _PATIENCE * interval_s + self._deadline_s:
                raise reading.failure or TelemetryUnavailableError(
                    Unavailable.TIMEOUT,
                    f"{self.place}: no interval of {interval_s:g} s has ended since engine time"
                    f" {self.now_s:g} s",
                )

    def _due_s(self, interval_s: float) -> float:
        """When the next interval is due to end, on the engine's grid; NaN before the first look."""
        now_s = self.now_s
        return (
            now_s if math.isnan(now_s) else (math.floor(now_s / interval_s + 1e-9) + 1) * interval_s
        )

    def release(self) -> None:
        """Give the lease back: the static plan holds at once.

        Raises:
            ControlUnavailableError: no answer; the lease runs out by itself.
            ControlRefusedError: the lease is somebody else's.
        """
        answer = self._control.release(self._holder)
        try:
            version = int(answer["version"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _unlike(error) from error
        self._lease_ends_s = -math.inf
        self._allocation = replace(self._static, version=version)

    def close(self) -> None:
        """End the reading thread and the connection; the lease is left to run out."""
        self._reader.close()
        self._control.close()

    def _look(self, due_s: float) -> Reading:
        """One look; an interval that ends before `due_s` is not told of yet."""
        self._reader.begin()
        control, control_failure = self._ask()
        fresh, notices, failure = False, [], None
        try:
            seen = self._reader.end(self._deadline_s)
            _check_start(control, seen, self.place)
            taken = self._take(seen, due_s)
            fresh, notices = taken.fresh, list(taken.notices)
            if taken.first_sight:
                notices += self._age.first_seen(seen)
        except TelemetryUnavailableError as error:
            failure = error
        telemetry = self._assembler.latest
        if telemetry is not None:
            telemetry = replace(telemetry, age_s=self._age.at(self._monotonic_s()))
            if control is not None and control.allocation is not None:
                telemetry = replace(telemetry, applied=control.allocation, read_back=True)
        return Reading(
            telemetry=telemetry,
            fresh=fresh,
            notices=tuple(notices),
            failure=failure,
            control=control,
            control_failure=control_failure,
        )

    def _take(self, seen: Seen, due_s: float) -> Taken:
        try:
            return self._assembler.take(seen.snapshot, due_s=due_s)
        except TelemetryUnavailableError as error:
            raise TelemetryUnavailableError(error.reason, f"{self.place}: {error}") from None

    def _ask(self) -> tuple[ControlView | None, str]:
        asked_s = self._monotonic_s()
        try:
            view = _view(self._control.get(), self._static, self.plan)
        except (ControlUnavailableError, ControlRefusedError) as error:
            return None, str(error)
        if view.allocation is not None:
            self._allocation = view.allocation
        ours = view.holder == self._holder
        self._lease_ends_s = asked_s + view.lease_left_s if ours else -math.inf
        return view, ""


def _view(answer: Mapping[str, Any], static: Allocation, plan: Plan) -> ControlView:
    try:
        digest, version = str(answer["plan_digest"]), int(answer["version"])
        held = None
        if digest == plan.digest:
            held = replace(allocation_from(answer["allocation"], static, plan), version=version)
        left_s, holder = answer["lease_left_s"], answer["holder"]
        return ControlView(
            allocation=held,
            version=version,
            state=str(answer["state"]),
            holder=None if holder is None else str(holder),
            lease_left_s=math.inf if left_s is None else float(left_s),
            plan=str(answer["plan"]),
            plan_digest=digest,
            start_id=None if answer.get("start_id") is None else int(answer["start_id"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, ProposalError) as error:
        raise _unlike(error) from error


def _check_start(control: ControlView | None, seen: Seen, place: str) -> None:
    """Refuse figures of another engine than that which takes the orders, as far as both tell.

    Raises:
        TelemetryUnavailableError: they are.
    """
    shown = seen.snapshot.values.get(START_ID, {}).get("", math.nan)
    # No number tells nothing: figures that are no use are found out where they are read.
    if control is None or control.start_id is None or math.isnan(shown):
        return
    if shown == control.start_id:
        return
    raise TelemetryUnavailableError(
        Unavailable.OTHER_ENGINE,
        f"{place}: these are the figures of another engine than the control socket's, or of"
        f" another start of it: start_id {shown:.0f}, not {control.start_id}; see that `metrics`"
        " and `control` name the same engine and rank",
    )


def _unlike(error: Exception) -> ControlUnavailableError:
    return ControlUnavailableError(
        f"control: the answer is not that of a Trimtab engine: {type(error).__name__} {error}"
    )


def _plain(values: Mapping[str, object]) -> dict[str, object]:
    """The knobs without those that hold what is no finite number; these stay, as in `limits`.

    Plain numbers come out, whatever type a policy computes in.
    """
    found: dict[str, object] = {}
    for knob, value in values.items():
        try:
            if isinstance(value, dict):
                found[knob] = {name: _number(entry) for name, entry in value.items()}
            else:
                found[knob] = _number(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return found


def _number(value: object) -> float | None:
    if value is None:
        return None  # A cap that is not there.
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError
    return int(value) if isinstance(value, numbers.Integral) else float(value)
