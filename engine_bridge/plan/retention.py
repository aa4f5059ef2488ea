"""The section of a plan that says how long cached blocks are worth keeping (rule 7).

The eviction itself is the scheduler's; here are only its classes and factors.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trimtab.engine_bridge.plan.section import Name, Section


class RetentionClass(Section):
    """Cached blocks of one tier, of one stop reason, reused or not."""

    tier: Name
    """Tier of the request that left the blocks."""
    stop_reason: Annotated[str, Field(max_length=64)] | None = None
    """Why that request ended, as the trace names it (`tool_use`). null: any reason."""
    reused: bool | None = None
    """Whether the block was ever hit again. null: either."""
    factor: Annotated[float, Field(ge=1e-9, le=1)]
    """Idle age is divided by it: 1 keeps as long as stock LRU does, 0.1 a tenth as long."""

    def matches(self, tier: str, stop_reason: str, reused: bool) -> bool:
        """Whether blocks with these marks belong to the class."""
        return (
            self.tier == tier
            and self.stop_reason in (None, stop_reason)
            and self.reused in (None, reused)
        )

    @property
    def detail(self) -> int:
        """How many marks the class asks for besides the tier: 0 is the tier's catch-all."""
        return (self.stop_reason is not None) + (self.reused is not None)


class Retention(Section):
    """How cached blocks that no request uses are reused."""

    eviction: Literal["scaled_age", "lru", "tier_order", "fixed_quota"] = "scaled_age"
    """scaled_age: oldest idle age divided by factor first; lru: oldest idle age first;
    tier_order: lowest tier first, oldest within it; fixed_quota: each pool's cache is held to its
    KV fraction. The last two are there to be compared with."""
    learn_reuse: bool = False
    """scaled_age: multiply each class's factor by the share of its idle blocks that were hit again
    lately, so that content which never comes back goes first, whatever its tier."""
    classes: Annotated[dict[Name, RetentionClass], Field(max_length=256)] = Field(
        default_factory=dict
    )
    """Retention classes in order. A block belongs to the one that matches most marks, of several
    the first. Empty: one class a tier, factor 1."""
