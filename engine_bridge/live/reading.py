"""What one look at a live engine gives: its figures, how its control stands, and what was odd.

Values only; `live_engine` makes them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.live.snapshot import TelemetryUnavailableError
from trimtab.engine_bridge.telemetry import Telemetry


class NoticeKind(enum.StrEnum):
    """What was odd and could be coped with; a closed set, fit for a metric's label."""

    COUNTER_RESET = "counter_reset"
    """A counter fell although the engine's time went on: the interval counts from zero."""
    RESTARTED = "restarted"
    """The engine's time went back: it is another run."""
    RENAMED = "renamed"
    """A series came under another known name. Told once."""
    MISSING_SERIES = "missing_series"
    """Series are missing that can be done without. Told once."""
    CLOCK_SKEW = "clock_skew"
    """The engine's wall clock and ours differ: only our own counts for the age. Told once."""


@dataclass(frozen=True)
class Notice:
    """One thing that was odd."""

    kind: NoticeKind
    text: str
    """One line for people."""


@dataclass(frozen=True, kw_only=True)
class ControlView:
    """What the engine's control socket says that holds."""

    allocation: Allocation | None
    """What holds, with its version; None where the engine runs another plan than ours."""
    version: int
    state: str
    """`static` or `leased`."""
    holder: str | None
    """Who holds the lease."""
    lease_left_s: float
    """Seconds; infinity for the static plan."""
    plan: str
    """Name of the engine's plan."""
    plan_digest: str
    start_id: int | None
    """Number of this start of the engine; None where it does not say one."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one look gave."""

    telemetry: Telemetry | None
    """None before the first whole interval; the old one again, older, where nothing new came."""
    fresh: bool
    """Whether the telemetry is of an interval that was not told of before."""
    notices: tuple[Notice, ...]
    failure: TelemetryUnavailableError | None
    """Why no figures came; None if some did, be they new or not."""
    control: ControlView | None
    """None if the control socket did not answer."""
    control_failure: str
    """Why it did not; empty if it did."""
