"""An allocation as its distance from the static plan, entry by entry, in units that compare.

What the observation tells of the applied allocation, and what the reward charges for moving it.
It makes no allocation: see `action`.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Final

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import Plan

RESIDUAL_FACTOR: Final = 10.0
"""A knob of so many times its static value has the residual 1."""
DIFFERENCE: Final = "applied - static"
LOG_RATIO: Final = "ln(applied / static) / ln 10"
LOG_RATIO_OF_COUNT: Final = "ln((1 + applied) / (1 + static)) / ln 10"
RESIDUALS: Final[dict[str, str]] = {
    "weights": LOG_RATIO,
    "kv_fractions": LOG_RATIO,
    "prefill_budget_tokens": LOG_RATIO,
    "prefill_shares": LOG_RATIO,
    "retention": LOG_RATIO,
    "slack_fraction": DIFFERENCE,
    "low_tier_chunk_share": LOG_RATIO,
    "shed_at": LOG_RATIO,
    "draft_tokens": LOG_RATIO_OF_COUNT,
    "max_running": LOG_RATIO,
    "max_num_seqs": LOG_RATIO,
}
"""The residual of each knob's entries."""


def open_entries(plan: Plan) -> dict[str, tuple[str, ...]]:
    """The knobs that the plan opens, each with a name for every entry."""
    owners = {
        "kv_fractions": plan.pool_names,
        "retention": plan.retention_names,
        "prefill_budget_tokens": (),
        "slack_fraction": (),
        "low_tier_chunk_share": (),
        "max_num_seqs": (),
    }
    entries = {}
    for knob in RESIDUALS:
        if getattr(plan.controller.bounds, knob) is not None:
            of = owners.get(knob, plan.tier_names)
            entries[knob] = tuple(f"{knob}.{owner}" for owner in of) or (knob,)
    return entries


class Residual:
    """Measures allocations of one plan over the knobs that it opens."""

    def __init__(self, plan: Plan) -> None:
        """Take the static plan as the origin."""
        entries = open_entries(plan)
        self._knobs = attrgetter(*entries)
        ways = [RESIDUALS[knob] for knob, names in entries.items() for _ in names]
        self._origin = tuple(zip(self._values(Allocation.static(plan)), ways, strict=True))

    def of(self, allocation: Allocation) -> list[float]:
        """The residual of each entry, in [-1, 1]; 0 where it is static, or no number."""
        return [
            0.0 if value == static or value != value else _residual(value, static, way)
            for value, (static, way) in zip(self._values(allocation), self._origin, strict=True)
        ]

    def _values(self, allocation: Allocation) -> list[float]:
        values: list[float] = []
        for knob in self._knobs(allocation):
            if isinstance(knob, tuple):
                values += knob
            else:
                values.append(knob)
        return values


def distance(one: list[float], other: list[float]) -> float:
    """Sum of the absolute differences of two residuals."""
    return sum([abs(a - b) for a, b in zip(one, other, strict=True)])


def log_ratio(ratio: float, factor: float) -> float:
    """ln(ratio) / ln(factor), clipped to [-1, 1]; a ratio of 0 or less is -1."""
    if ratio >= factor:
        return 1.0
    return math.log(ratio) / math.log(factor) if ratio * factor > 1.0 else -1.0


def _residual(value: float, static: float, way: str) -> float:
    if way == DIFFERENCE:
        return min(max(value - static, -1.0), 1.0)
    offset = 1.0 if way == LOG_RATIO_OF_COUNT else 0.0
    return log_ratio((value + offset) / (static + offset), RESIDUAL_FACTOR)
