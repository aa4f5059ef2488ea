"""The sections of a plan that bound the controller: floor, ceiling, greatest change per interval.

Each says how far one number may go; `trimtab.engine_bridge.limits` holds an allocation to them.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Self, TypeVar

from pydantic import Field, model_validator

from trimtab.engine_bridge.plan.section import (
    Count,
    Fraction,
    PositiveCount,
    PositiveFraction,
    Section,
    fault,
)

Bounds = TypeVar("Bounds", bound=Section)
Factor = Annotated[float, Field(ge=1, le=1e6)]
Positive = Annotated[float, Field(ge=1e-9, le=1e9)]


class FactorBounds(Section):
    """Bounds of a knob whose changes are multiplications."""

    integer: ClassVar[bool] = False
    """Whether the knob takes whole numbers only."""

    floor: Positive
    """Least value."""
    ceiling: Positive
    """Greatest value."""
    max_change_factor: Factor
    """In one interval the value may be multiplied or divided by at most this; 1 freezes it."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _ordered(self, self.floor, self.ceiling)

    def reach(self, previous: float) -> tuple[float, float]:
        """Least and greatest value that may follow `previous` in one interval."""
        lowest, highest = previous / self.max_change_factor, previous * self.max_change_factor
        return max(self.floor, lowest), min(self.ceiling, highest)


class TokenBounds(Section):
    """Bounds of a number of tokens whose changes are multiplications."""

    integer: ClassVar[bool] = True
    """Whether the knob takes whole numbers only."""

    floor: PositiveCount
    """Least number of tokens."""
    ceiling: PositiveCount
    """Greatest number of tokens."""
    max_change_factor: Factor
    """In one interval the value may be multiplied or divided by at most this; 1 freezes it."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _ordered(self, self.floor, self.ceiling)

    def reach(self, previous: float) -> tuple[float, float]:
        """Least and greatest number that may follow `previous` in one interval."""
        lowest, highest = previous / self.max_change_factor, previous * self.max_change_factor
        return max(self.floor, math.ceil(lowest)), min(self.ceiling, math.floor(highest))


class ShareBounds(Section):
    """Bounds of a fraction of a whole."""

    integer: ClassVar[bool] = False
    """Whether the knob takes whole numbers only."""

    floor: Fraction
    """Least fraction."""
    ceiling: PositiveFraction
    """Greatest fraction."""
    max_change: Fraction
    """In one interval the fraction may rise or fall by at most this; 0 freezes it."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _ordered(self, self.floor, self.ceiling)

    def reach(self, previous: float) -> tuple[float, float]:
        """Least and greatest value that may follow `previous` in one interval."""
        lowest, highest = previous - self.max_change, previous + self.max_change
        return max(self.floor, lowest), min(self.ceiling, highest)


class ShedBounds(Section):
    """Bounds of the multiple of its target at which a request is given up."""

    integer: ClassVar[bool] = False
    """Whether the knob takes whole numbers only."""

    floor: Annotated[float, Field(gt=0, le=10)]
    """Least multiple."""
    ceiling: Annotated[float, Field(gt=0, le=10)]
    """Greatest multiple."""
    max_change: Annotated[float, Field(ge=0, le=10)]
    """In one interval the multiple may rise or fall by at most this; 0 freezes it."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _ordered(self, self.floor, self.ceiling)

    def reach(self, previous: float) -> tuple[float, float]:
        """Least and greatest value that may follow `previous` in one interval."""
        lowest, highest = previous - self.max_change, previous + self.max_change
        return max(self.floor, lowest), min(self.ceiling, highest)


class CountBounds(Section):
    """Bounds of a whole number."""

    integer: ClassVar[bool] = True
    """Whether the knob takes whole numbers only."""

    floor: Count
    """Least number."""
    ceiling: Count
    """Greatest number."""
    max_change: Count | None = None
    """In one interval the number may rise or fall by at most this. null: by any number."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        return _ordered(self, self.floor, self.ceiling)

    def reach(self, previous: float) -> tuple[float, float]:
        """Least and greatest number that may follow `previous` in one interval."""
        if self.max_change is None:
            return self.floor, self.ceiling
        lowest, highest = previous - self.max_change, previous + self.max_change
        return max(self.floor, lowest), min(self.ceiling, highest)


class CapBounds(CountBounds):
    """Bounds of a cap on running requests; lowering one drains and never aborts."""

    floor: PositiveCount
    """Least cap: below 1 nothing would run."""


AnyBounds = FactorBounds | TokenBounds | ShareBounds | ShedBounds | CountBounds
"""Bounds of any knob."""


class KnobBounds(Section):
    """One entry a knob; an optional knob that is null is closed: it keeps its static value."""

    weights: FactorBounds
    """Per-tier weights."""
    kv_fractions: ShareBounds
    """Per-pool KV fractions."""
    prefill_budget_tokens: TokenBounds
    """Prefill tokens that a step may add."""
    prefill_shares: ShareBounds
    """Per-tier shares of the prefill budget."""
    retention: FactorBounds | None = None
    """Retention factors, one a class (rule 7)."""
    slack_fraction: ShareBounds | None = None
    """Share of the saved-up slack that one step may spend (rule 13)."""
    low_tier_chunk_share: ShareBounds | None = None
    """Low tiers' part of the prefill ceiling (rule 13)."""
    shed_at: ShedBounds | None = None
    """Per-tier multiple of the target at which a request is given up (rule 15)."""
    draft_tokens: CountBounds | None = None
    """Per-tier draft length (rule 9)."""
    max_running: CapBounds | None = None
    """Per-tier cap on running requests."""
    max_num_seqs: CapBounds | None = None
    """Cap on all running requests; the engine's start-up capacity is a bound of its own."""


class Controller(Section):
    """How the controller acts, and what it may not do."""

    interval_s: Annotated[float, Field(ge=0.05, le=3600)]
    """Seconds between two allocations."""
    lease_intervals: Annotated[PositiveCount, Field(le=1000)]
    """An allocation that is not renewed for so many intervals gives way to the static plan."""
    bounds: KnobBounds
    """What the controller may set."""

    @property
    def lease_s(self) -> float:
        """Time to live of an allocation, seconds."""
        return self.interval_s * self.lease_intervals


def _ordered(bounds: Bounds, floor: float, ceiling: float) -> Bounds:
    if ceiling < floor:
        raise fault("ceiling", value=ceiling, bound=f"at least the floor, {floor}")
    return bounds
