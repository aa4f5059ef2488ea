"""A daemon whose loops stand as the test says: the view that the web part has of the real one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tests.conformance.policy_conformance import telemetry, tier_telemetry
from trimtab.agents.verdict import GuardMode, GuardReason, GuardTally
from trimtab.controller.daemon.command import Command, CommandKind
from trimtab.controller.daemon.state import Contact, Decision, LoopState
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import load_plan

PLAN = load_plan()
STATIC = Allocation.static(PLAN)
MOVED = replace(STATIC, weights=(9900.0, 90.0, 5.0, 1.0), kv_fractions=(0.66, 0.24, 0.1))
INTERVAL_S = float(PLAN.controller.interval_s)
NOW_S = 1_796_040_000.0
TOKEN = "a-token-for-the-tests"


def tally(**seen: Any) -> GuardTally:
    figures: dict[str, Any] = {
        "intervals": 0,
        "fell_back": 0,
        "trips": 0,
        "latched": False,
        "reasons": dict.fromkeys(GuardReason, 0),
    }
    return GuardTally(**{**figures, **seen})


def decision(number: int, **seen: Any) -> Decision:
    """One tick under an active policy; tick 100 was a second before `NOW_S`."""
    tiers = len(PLAN.tiers)
    figures: dict[str, Any] = {
        "number": number,
        "unix_s": NOW_S - 1.0 - (100 - number) * INTERVAL_S,
        "contact": Contact.CONTROLLING,
        "mode": GuardMode.ACTIVE,
        "reasons": (),
        "exposure": 1.0,
        "fell_back": False,
        "asked": MOVED,
        "applied": MOVED,
        "attainment": (1.0,) * tiers,
        "samples": (10,) * tiers,
        "ttft_ms_p99": (500.0,) * tiers,
        "queue_length": (number % 7,) * tiers,
        "age_s": 0.2,
        "tick_ms": 3.0,
    }
    return Decision(**{**figures, **seen})


def state(engine: str = "a", *, last: Mapping[str, Any] | None = None, **seen: Any) -> LoopState:
    """A loop that has steered well for a hundred ticks.

    Args:
        engine: Its name.
        last: What is different in the last decision.
        seen: What is different in the state.
    """
    history: Sequence[Decision] = [decision(number) for number in range(1, 101)]
    if last:
        history = [*history[:-1], replace(history[-1], **last)]
    tiers = [
        tier_telemetry(arrivals=4, attainment=1.0, attainment_samples=10, ttft_ms_p99=500.0)
        for _ in PLAN.tiers
    ]
    figures: dict[str, Any] = {
        "engine": engine,
        "plan": PLAN,
        "policy": "learned",
        "bundle_digest": None,
        "bundle_error": "",
        "contact": Contact.CONTROLLING,
        "detail": "",
        "holder": "trimtab@host:1-ab",
        "lease_left_s": 10.0,
        "mode": GuardMode.ACTIVE,
        "latched": False,
        "tally": tally(intervals=100),
        "telemetry": telemetry(PLAN, tiers, applied=MOVED),
        "age_s": 0.2,
        "history": tuple(history),
        "ticks": 100,
        "late_ticks": 0,
        "audit_lost": 0,
        "profile": "",
    }
    return LoopState(**{**figures, **seen})


def fresh_state(engine: str = "a") -> LoopState:
    """A loop before its first tick."""
    return state(
        engine,
        history=(),
        ticks=0,
        contact=Contact.STARTING,
        telemetry=None,
        age_s=math.inf,
        holder=None,
        lease_left_s=0.0,
    )


class FakeDaemon:
    """Meets `DaemonView`; orders take effect at once."""

    def __init__(self, *states: LoopState) -> None:
        self.by_engine = {each.engine: each for each in states or (state(),)}
        self.orders: list[tuple[str | None, Command]] = []
        self.now_s = NOW_S

    def states(self) -> Mapping[str, LoopState]:
        return self.by_engine

    def now_unix_s(self) -> float:
        return self.now_s

    def command(self, engine: str | None, command: Command) -> None:
        self.orders.append((engine, command))
        modes = {CommandKind.HOLD: GuardMode.HOLD, CommandKind.RELEASE: GuardMode.ACTIVE}
        mode = command.mode or modes[command.kind]
        for name in [engine] if engine else list(self.by_engine):
            now = self.by_engine[name]
            self.by_engine[name] = replace(now, mode=mode, ticks=now.ticks + 2)
