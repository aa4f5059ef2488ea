"""One tick as it is filled in, and how it is put for people: a decision, a line of detail, the log.

It decides nothing and asks nobody.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Final

from trimtab.agents.verdict import GuardMode, Verdict
from trimtab.controller.daemon.changes import ChangeLog
from trimtab.controller.daemon.state import Contact, Decision
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.live.live_engine import Reading
from trimtab.engine_bridge.plan import Plan

_CALM: Final = (Contact.CONTROLLING, Contact.STANDBY)


@dataclass(kw_only=True)
class Tick:
    """What one tick has come to so far."""

    number: int
    """Counts the loop's ticks from 1."""
    reading: Reading
    contact: Contact
    asked: Allocation
    """What the engine is asked for; the static plan unless the guard says otherwise."""
    ours_until_s: float
    """When the lease that was ours at the look ends; infinite where none was, monotonic seconds."""
    verdict: Verdict | None = None
    """None where the guard was not asked."""
    applied: Allocation | None = None
    """What the engine answered; None without an answer."""
    refusal: str = ""
    """Why the engine did not take what it was asked for."""
    policy_error: str = ""
    """Why the policy gave nothing."""

    @property
    def age_s(self) -> float:
        """Of the telemetry, seconds; infinite without any."""
        telemetry = self.reading.telemetry
        return math.inf if telemetry is None else telemetry.age_s


def decision_of(tick: Tick, *, unix_s: float, mode: GuardMode, tick_ms: float) -> Decision:
    """A tick as the dashboard lists and draws it."""
    verdict, telemetry = tick.verdict, tick.reading.telemetry
    tiers = () if telemetry is None else telemetry.tiers
    return Decision(
        number=tick.number,
        unix_s=unix_s,
        contact=tick.contact,
        mode=mode,
        reasons=() if verdict is None else verdict.reasons,
        exposure=0.0 if verdict is None else verdict.exposure,
        fell_back=verdict is not None and verdict.fell_back,
        asked=tick.asked,
        applied=tick.applied,
        attainment=tuple(tier.attainment for tier in tiers),
        samples=tuple(tier.attainment_samples for tier in tiers),
        ttft_ms_p99=tuple(tier.ttft_ms_p99 for tier in tiers),
        queue_length=tuple(tier.queue_length for tier in tiers),
        age_s=tick.age_s,
        tick_ms=tick_ms,
    )


def detail_of(tick: Tick, plan: Plan, *, audit: str, profile: str) -> str:
    """One line with all that is not well.

    Args:
        tick: The tick.
        plan: Ours.
        audit: Why the audit log cannot be written; empty if it can.
        profile: Why the last profile failed; empty if it did not.
    """
    reading, other = tick.reading, ""
    if tick.contact is Contact.WRONG_PLAN and reading.control is not None:
        theirs = reading.control
        other = (
            f"the engine runs plan {theirs.plan} {theirs.plan_digest[:12]}, not {plan.name}"
            f" {plan.digest[:12]}"
        )
    words = (
        other,
        tick.refusal or reading.control_failure,
        "" if reading.failure is None else str(reading.failure),
        *(notice.text for notice in reading.notices),
        tick.policy_error,
        f"audit log: {audit}" if audit else "",
        profile,
    )
    return "; ".join(filter(None, words))


def log_changes(changes: ChangeLog, tick: Tick, *, audit: str, latched: bool) -> None:
    """Log what is otherwise than at the tick before.

    Args:
        changes: What was said before.
        tick: The tick.
        audit: Why the audit log cannot be written; empty if it can.
        latched: Whether the guard has latched the static plan.
    """
    note, warning, reading = changes.note, logging.WARNING, tick.reading
    why = tick.refusal or reading.control_failure
    level = logging.INFO if tick.contact in _CALM else warning
    note("contact", tick.contact, f"{tick.contact}: {why}" if why else tick.contact, level=level)
    failure = reading.failure
    if failure is None:
        note("figures", "", "figures come again")
    else:
        note("figures", failure.reason, f"no figures: {failure}", level=warning)
    for notice in reading.notices:
        note(f"notice {notice.kind}", notice.text, notice.text, level=warning)
    error = tick.policy_error
    note("policy", bool(error) or "", error or "the policy answers again", level=warning)
    note("audit", bool(audit) or "", audit or "the audit log is written again", level=warning)
    note("latch", latched or "", "latched on static" if latched else "unlatched", level=warning)
    if tick.verdict is not None:
        verdict, reasons = tick.verdict, ", ".join(tick.verdict.reasons)
        words = f"fell back to static: {reasons}" if verdict.fell_back else "no longer fallen back"
        note("guard", reasons if verdict.fell_back else "", words, level=warning)
        note("mode", verdict.mode, f"mode {verdict.mode}")
