"""What a loop shows of itself: one frozen value a tick, for the dashboard, metrics and health.

Values only; `loop` makes them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trimtab.agents.verdict import GuardMode, GuardReason, GuardTally
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry


class Contact(enum.StrEnum):
    """How the loop stands with its engine; a closed set, fit for a metric's label."""

    STARTING = "starting"
    """No answer yet."""
    CONTROLLING = "controlling"
    """It holds the lease, and its figures come."""
    NO_TELEMETRY = "no_telemetry"
    """It holds the lease; figures do not come or are too old to act on."""
    STANDBY = "standby"
    """Another controller holds the lease: it watches and waits."""
    NO_CONTROL = "no_control"
    """The control socket does not answer: the engine returns to its static plan by itself."""
    WRONG_PLAN = "wrong_plan"
    """The engine runs another plan: nothing is sent to it."""
    WRONG_ENGINE = "wrong_engine"
    """The figures are those of another engine than the socket's: nothing is sent to it."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One tick, as the dashboard lists and draws it."""

    number: int
    """Counts the loop's ticks from 1."""
    unix_s: float
    """When, seconds since 1970."""
    contact: Contact
    mode: GuardMode
    reasons: tuple[GuardReason, ...]
    exposure: float
    """Part of the policy's residual that was asked for, in [0, 1]."""
    fell_back: bool
    asked: Allocation
    """What the engine was asked for, or would have been."""
    applied: Allocation | None
    """What the engine answered; None without an answer."""
    attainment: tuple[float, ...]
    """By tier, NaN without samples."""
    samples: tuple[int, ...]
    """Requests judged, by tier."""
    ttft_ms_p99: tuple[float, ...]
    """By tier, NaN without data."""
    queue_length: tuple[int, ...]
    age_s: float
    """Age of the telemetry; infinite without any."""
    tick_ms: float
    """How long the tick took."""


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """One engine's loop after a tick; `LoopState`s are never changed, only replaced."""

    engine: str
    """Its name in the settings."""
    plan: Plan
    policy: str
    """The name of the policy in charge, for instance `learned` or `bundle:...`."""
    bundle_digest: str | None
    """Of the policy's bundle; None for a policy without one."""
    bundle_error: str
    """Why the newest bundle on disk was not taken; empty if it was."""
    contact: Contact
    detail: str
    """One line about the last failure or notice; empty when all is well."""
    holder: str | None
    """Who holds the engine's lease, as the engine said last."""
    lease_left_s: float
    """Time until the engine returns to static by itself, as far as the loop knows; 0 without."""
    mode: GuardMode
    latched: bool
    """Whether only a release lets the policy act again."""
    tally: GuardTally
    telemetry: Telemetry | None
    """The last one; None before the first."""
    age_s: float
    """Of the telemetry, seconds; infinite without any."""
    history: tuple[Decision, ...]
    """The last decisions, oldest first; at most `MOST_HISTORY`. Empty before the first tick."""
    ticks: int
    late_ticks: int
    """Ticks that began more than half an interval late, or were left out."""
    audit_lost: int
    """Entries that the audit log could not keep."""
    profile: str
    """Path of the last traffic profile; empty without one."""
    faults: int = 0
    """Ticks that failed by a fault of Trimtab itself."""


MOST_HISTORY = 900
"""Decisions that a state carries: half an hour at two seconds."""
