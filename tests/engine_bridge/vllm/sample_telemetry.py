"""Telemetry for tests, written down instead of measured."""

from __future__ import annotations

import math
from typing import Any

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry


def tier(**fields: Any) -> TierTelemetry:
    """An idle tier, but for the fields given."""
    quiet: dict[str, Any] = {
        name: math.nan if kind == "float" else 0
        for name, kind in TierTelemetry.__annotations__.items()
    }
    quiet |= {"oldest_wait_s": 0.0, "service_ms": 0.0}
    return TierTelemetry(**(quiet | fields))


def telemetry(plan: Plan, *tiers: TierTelemetry, **fields: Any) -> Telemetry:
    """An interval of 2 s; tiers that are left out are idle."""
    missing = len(plan.tiers) - len(tiers)
    usual: dict[str, Any] = {
        "time_s": 2.0,
        "interval_s": 2.0,
        "step_ms_mean": 10.0,
        "steps": 200,
        "batch_mean": 12.5,
        "kv_use_fraction": 0.25,
        "busy_fraction": 1.0,
        "applied": Allocation.static(plan),
        "age_s": 0.0,
    }
    return Telemetry(tiers=(*tiers, *(tier() for _ in range(missing))), **(usual | fields))
