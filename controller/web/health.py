"""Whether the daemon lives and whether it does its work, for supervisors and load balancers.

Alive: every loop ticks. Ready: every engine is steered, or watched for another controller, with
fresh figures. Neither says anything about what the tiers get.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from trimtab.agents.guard_settings import GuardSettings
from trimtab.controller.daemon.state import Contact, LoopState
from trimtab.controller.web.view import age_now_s, since_tick_s
from trimtab.controller.web.words import CONTACTS, LATE_INTERVALS, seconds

_FRESH_INTERVALS = GuardSettings().static_after_intervals
"""Older figures make the guard fall back."""


def not_alive(
    states: Mapping[str, LoopState], now_unix_s: float, started_unix_s: float
) -> dict[str, str]:
    """Engines whose loop has not ticked for 5 intervals, and why that is said.

    Args:
        states: By engine.
        now_unix_s: Seconds since 1970.
        started_unix_s: Since when loops can be expected to tick, seconds since 1970.
    """
    found = {}
    for engine, state in states.items():
        most_s = LATE_INTERVALS * state.plan.controller.interval_s
        silent_s = since_tick_s(state, now_unix_s)
        if math.isinf(silent_s):
            silent_s = now_unix_s - started_unix_s
        if silent_s > most_s:
            found[engine] = f"no tick for {seconds(silent_s)}; at most {seconds(most_s)} is right"
    return found


def not_ready(
    states: Mapping[str, LoopState], now_unix_s: float, started_unix_s: float
) -> dict[str, str]:
    """Engines that are not steered or watched with fresh figures, and why.

    Args:
        states: By engine.
        now_unix_s: Seconds since 1970.
        started_unix_s: Since when loops can be expected to tick, seconds since 1970.
    """
    found = not_alive(states, now_unix_s, started_unix_s)
    for engine, state in states.items():
        if engine in found:
            continue
        most_s = _FRESH_INTERVALS * state.plan.controller.interval_s
        age_s = age_now_s(state, now_unix_s)
        if state.contact not in (Contact.CONTROLLING, Contact.STANDBY):
            found[engine] = ": ".join(filter(None, (CONTACTS[state.contact], state.detail)))
        elif math.isinf(age_s):
            found[engine] = "no telemetry yet"
        elif age_s > most_s:
            found[engine] = f"telemetry is {seconds(age_s)} old; at most {seconds(most_s)} is right"
    return found
