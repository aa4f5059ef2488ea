"""How an engine stands, in words for people: one sentence, how bad it is, and what to do.

The dashboard, `trimtab status` and the health routes all take their words from here; the codes are
in `trimtab.agents.verdict` and `trimtab.controller.daemon.state`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from trimtab.agents.verdict import GuardMode, GuardReason
from trimtab.controller.daemon.state import Contact, Decision, LoopState
from trimtab.controller.web.view import since_tick_s

LATE_INTERVALS: Final = 5.0
"""A loop that has not ticked for so many intervals counts as stuck."""

REASONS: Final[Mapping[GuardReason, str]] = MappingProxyType(
    {
        GuardReason.POLICY_FAILED: "the policy gave no answer that can be used",
        GuardReason.NON_FINITE: "the policy asked for something that is no number",
        GuardReason.STALE: "the telemetry was too old to act on",
        GuardReason.OUT_OF_ENVELOPE: "the traffic was unlike what the policy was trained on",
        GuardReason.FLOORS_AND_TOTALS: "the policy asked for more than its bounds allow",
        GuardReason.SLEW: "the policy asked for a greater change than one interval allows",
        GuardReason.SLO_REGRESSION: "promises were kept worse than under the static plan",
        GuardReason.ACTUATION_MISMATCH: "the engine did not do what it was asked for",
        GuardReason.OPERATOR_HOLD: "an operator holds the allocation",
    }
)
"""Why something else than the policy's wish is applied. In the past tense: a reason is named until
the policy may act again."""

CONTACTS: Final[Mapping[Contact, str]] = MappingProxyType(
    {
        Contact.STARTING: "starting",
        Contact.CONTROLLING: "controlling",
        Contact.NO_TELEMETRY: "no usable telemetry",
        Contact.STANDBY: "standing by, another controller holds the lease",
        Contact.NO_CONTROL: "the control socket does not answer",
        Contact.WRONG_PLAN: "the engine runs another plan",
        Contact.WRONG_ENGINE: "the figures are another engine's",
    }
)
"""How a loop stands with its engine."""

MODES: Final[Mapping[GuardMode, str]] = MappingProxyType(
    {
        GuardMode.STATIC: "the static plan; the policy is not asked",
        GuardMode.SHADOW: "the static plan; the policy is asked, but only watched",
        GuardMode.CANARY: "a part of the policy's residual acts",
        GuardMode.ACTIVE: "the whole of the policy's residual acts",
        GuardMode.HOLD: "what was applied last stays",
    }
)
"""What a mode lets a policy do."""


class Level(enum.StrEnum):
    """How a sentence is meant; a closed set."""

    GOOD = "good"
    """All as it should be."""
    NOTE = "note"
    """Lawful, and somebody may want to know."""
    BAD = "bad"
    """Somebody should look."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one engine stands."""

    level: Level
    headline: str
    """One sentence without a full stop; the age of the data is not in it."""
    hint: str
    """What to do, or what will happen without doing anything; empty when all is well."""


def standing(state: LoopState, now_unix_s: float) -> Standing:
    """How an engine stands now.

    Args:
        state: The newest state of its loop.
        now_unix_s: Seconds since 1970.
    """
    silent_s = since_tick_s(state, now_unix_s)
    if math.isfinite(silent_s) and silent_s > LATE_INTERVALS * state.plan.controller.interval_s:
        return _bad(
            f"The daemon's loop for this engine has not ticked for {seconds(silent_s)}",
            "The engine returns to its static plan by itself when the lease ends. "
            "Look at the daemon's log; restart it if the loop does not come back.",
        )
    match state.contact:
        case Contact.CONTROLLING:
            return _controlling(state)
        case Contact.NO_TELEMETRY:
            return _no_telemetry(state)
    return _not_in_charge(state)


def _not_in_charge(state: LoopState) -> Standing:
    match state.contact:
        case Contact.STARTING:
            return _note("Starting: the engine has not answered yet", "Wait for the first tick.")
        case Contact.STANDBY:
            holder = state.holder or "another controller"
            return _note(
                f"Standing by: {holder} holds the engine's lease",
                "It takes over when the holder stops or releases. Nothing is sent until then.",
            )
        case Contact.WRONG_PLAN:
            return _bad(
                "Not controlling: the engine runs another plan than this daemon",
                "Nothing is sent. Give both the same plan file and restart the one that is behind.",
            )
        case Contact.WRONG_ENGINE:
            return _bad(
                "Not controlling: the figures are those of another engine than the socket's",
                "Nothing is sent. See that `metrics` and `control` in the settings name the same "
                "engine. After a restart of it this passes with the next scrape.",
            )
    returns = (
        f"It returns to its static plan by itself within {seconds(state.lease_left_s)}. "
        if state.lease_left_s > 0
        else "The lease is over: if it runs, it keeps to its static plan. "
    )
    blind = state.age_s > 2 * state.plan.controller.interval_s
    return _bad(
        "The engine answers neither for control nor for metrics"
        if blind
        else "The engine's control socket does not answer",
        returns + "See whether the engine runs, and whether the daemon reaches its socket.",
    )


def _no_telemetry(state: LoopState) -> Standing:
    where = "See whether the engine's /metrics answers and, with Prometheus, whether it is scraped."
    if state.telemetry is None:
        return _bad("No telemetry yet: the static plan is asked for", where)
    last = state.history[-1] if state.history else None
    if last is None or _is_static(last):
        return _bad("Fell back to the static plan: the telemetry is too old to act on", where)
    return _bad("Keeps the last allocation: the telemetry is too old to act on", where)


def _controlling(state: LoopState) -> Standing:
    last = state.history[-1] if state.history else None
    if state.latched:
        return _bad(
            f"Latched on the static plan after {state.tally.trips} trips",
            "Only Release lets the policy act again. Read the decisions below before.",
        )
    if last is None:
        return _note("Controlling: nothing decided yet", "Wait for the first tick.")
    if last.fell_back:
        return _bad(
            f"Fell back to the static plan: {_causes(last)}",
            "The policy comes back by itself after a cool-down and a probation.",
        )
    if state.mode is GuardMode.HOLD:
        return _note(
            "Held by an operator: the last allocation stays",
            "Release ends the hold; the policy then begins with a probation.",
        )
    if GuardReason.STALE in last.reasons:
        return _note(
            "Keeps the last allocation: the telemetry is late",
            "It falls back to the static plan if no fresh figures come.",
        )
    return _by_mode(state, last)


def _by_mode(state: LoopState, last: Decision) -> Standing:
    policy = policy_words(state.policy)
    if state.mode is GuardMode.STATIC:
        return _note("Static plan, as ordered: the policy is not asked")
    if state.policy == "static":
        return _good("Controlling; the static plan is the policy")
    if state.mode is GuardMode.SHADOW:
        return _note(f"Static plan, as ordered: {policy} is watched in shadow mode")
    canary = " (canary)" if state.mode is GuardMode.CANARY else ""
    if last.exposure <= 0:
        return _good(f"Controlling{canary}; static plan while {policy} is on probation")
    if last.exposure < 1:
        part = f"{100 * last.exposure:.0f} %"
        return _good(f"Controlling{canary}; {policy} at {part} of its residual")
    return _good(f"Controlling; {policy} in full")


def policy_words(policy: str) -> str:
    """A policy by its name in the settings, in words: `learned` is the `learned policy`."""
    return f"{policy} policy" if policy.isalpha() else f"policy {policy}"


def seconds(time_s: float) -> str:
    """A time for people, in two figures: `1.2 s`, `14 s`, `3 min`, `2 h`."""
    if not math.isfinite(time_s):
        return "an unknown time"
    if time_s < 10:
        return f"{time_s:.1f} s"
    if time_s < 120:
        return f"{time_s:.0f} s"
    return f"{time_s / 60:.0f} min" if time_s < 7200 else f"{time_s / 3600:.0f} h"


def age_words(age_s: float) -> str:
    """The age of data, for the end of a sentence."""
    return f"data {seconds(age_s)} old" if math.isfinite(age_s) else "no data"


def _causes(decision: Decision) -> str:
    """Words for a decision's reasons."""
    words = [REASONS.get(reason, reason.value) for reason in decision.reasons]
    return ", and ".join(words) if words else "the reason was not recorded"


def _is_static(decision: Decision) -> bool:
    return decision.fell_back or decision.exposure == 0


def _good(headline: str) -> Standing:
    return Standing(level=Level.GOOD, headline=headline, hint="")


def _note(headline: str, hint: str = "") -> Standing:
    return Standing(level=Level.NOTE, headline=headline, hint=hint)


def _bad(headline: str, hint: str) -> Standing:
    return Standing(level=Level.BAD, headline=headline, hint=hint)
