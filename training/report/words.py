"""Numbers as people read them, and means over seeds. It writes no sentences."""

from __future__ import annotations

import math
from collections.abc import Callable

from trimtab.training.whatif.schema import RunResult, TierFacts, TierMetrics, WhatIfResult

NONE = "\N{EN DASH}"
"""What stands for "no data"."""


def percent(share: float, digits: int = 1) -> str:
    """A share as "97.1 %"; never rounded up to a full 100."""
    if not math.isfinite(share):
        return NONE
    shown = round(share * 100, digits)
    if shown >= 100 and share < 1:
        shown = 100 - 10.0**-digits
    return f"{shown:.{digits}f} %" if share < 1 else "100 %"


def percent_against(share: float, target: float) -> str:
    """A share with as many digits as it takes to see on which side of the target it is."""
    if math.isfinite(share) and math.isfinite(target) and share < target:
        for digits in (1, 2, 3):
            if round(share * 100, digits) < round(target * 100, digits):
                return percent(share, digits)
    return percent(share)


def signed(value: float, digits: int = 1) -> str:
    """A number with its sign, with a true minus."""
    if not math.isfinite(value):
        return NONE
    text = f"{abs(value):,.{digits}f}"
    if float(text.replace(",", "")) == 0:
        return text
    return f"\N{MINUS SIGN}{text}" if value < 0 else f"+{text}"


def number(value: float, digits: int | None = None) -> str:
    """A number with thousands marks and about three figures."""
    if not math.isfinite(value):
        return NONE
    if digits is None:
        digits = 0 if abs(value) >= 100 or value == round(value) else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def figures(value: float) -> str:
    """A number with three figures: "0.029", "1.61", "179"."""
    if not math.isfinite(value):
        return NONE
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def milliseconds(value: float) -> str:
    """A latency as "12.3 ms", "480 ms" or "15.2 s"."""
    if not math.isfinite(value):
        return NONE
    if abs(value) < 10_000:
        return f"{number(value)} ms"
    return f"{number(value / 1e3)} s"


def duration(seconds: float) -> str:
    """A span as "45 s", "12.5 min" or "1.0 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    size, unit = (60, "min") if seconds < 7200 else (3600, "h")
    return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"


def dollars(value: float) -> str:
    """A price as "$1.24", below a dollar as "$0.062"."""
    if not math.isfinite(value):
        return NONE
    return f"${value:,.2f}" if value >= 1 else f"${value:.3f}"


def dollars_between(low: float, high: float) -> str:
    """An interval of prices as "$0.05 to $0.12"."""
    return f"{signed_dollars(low)} to {signed_dollars(high)}"


def signed_dollars(value: float) -> str:
    """A price that may be below zero, with a true minus."""
    return f"\N{MINUS SIGN}{dollars(-value)}" if value < 0 else dollars(value)


def promise(tier: TierFacts) -> str:
    """The tier's latency targets as "TTFT 800 ms, TPOT 40 ms"."""
    targets = (("TTFT", tier.ttft_ms), ("TPOT", tier.tpot_ms), ("E2E", tier.e2e_ms))
    known = [f"{name} {milliseconds(ms)}" for name, ms in targets if math.isfinite(ms)]
    return ", ".join(known) or "no latency target"


def over_seeds(result: WhatIfResult, policy: str, figure: Callable[[RunResult], float]) -> float:
    """The mean of a figure over the seeds that have it; NaN if none has."""
    known = [value for run in result.runs(policy) if math.isfinite(value := float(figure(run)))]
    return sum(known) / len(known) if known else float("nan")


def of_tier(
    result: WhatIfResult, policy: str, tier: str, figure: Callable[[TierMetrics], float]
) -> float:
    """The mean of a tier's figure over the seeds."""
    return over_seeds(result, policy, lambda run: figure(run.tiers[tier]))


def attained(result: WhatIfResult, policy: str, tier: str) -> float:
    """The tier's mean attainment over the seeds."""
    return of_tier(result, policy, tier, lambda m: m.attainment)


def weighted(result: WhatIfResult, policy: str) -> float:
    """The mean weighted attainment over the seeds."""
    return over_seeds(result, policy, lambda run: run.engine.weighted_attainment)
