"""The allocation: every knob of the fair scheduler, as one immutable, versioned value.

It holds no bounds: what may be set is in the plan, and `trimtab.engine_bridge.limits` keeps to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from trimtab.engine_bridge.errors import AllocationError
from trimtab.engine_bridge.plan import Plan

UNLIMITED: Final = 2**31 - 1
"""A cap on running requests that is not there: the engine's own start-up capacity holds."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What a controller sets; tuples follow the plan's order of tiers, pools and classes."""

    weights: tuple[float, ...]
    """Per-tier weight of the fair queueing."""
    kv_fractions: tuple[float, ...]
    """Per-pool guaranteed fraction of the KV blocks; they sum to 1."""
    prefill_budget_tokens: int
    """Most prefill tokens in a step."""
    prefill_shares: tuple[float, ...]
    """Per-tier share of the prefill budget; they sum to 1."""
    retention: tuple[float, ...]
    """Retention factor of each class of cached blocks."""
    slack_fraction: float
    """Part of the saved-up slack that one step may spend."""
    low_tier_chunk_share: float
    """Part of the prefill budget that all low tiers together may use."""
    shed_at: tuple[float, ...]
    """Per-tier multiple of the TTFT (else E2E) target at which a request is given up."""
    draft_tokens: tuple[int, ...]
    """Per-tier draft length under speculation; 0 turns it off."""
    max_running: tuple[int, ...]
    """Per-tier cap on running requests, or `UNLIMITED`."""
    max_num_seqs: int
    """Cap on all running requests, or `UNLIMITED`."""
    version: int = 0
    """Counts the allocations of one controller; 0 is the static plan."""

    @classmethod
    def static(cls, plan: Plan) -> Self:
        """The plan's static shares: what holds when no controller speaks."""
        tiers = plan.tiers.values()
        capacity = plan.engine.max_num_seqs
        return cls(
            weights=tuple(float(tier.weight) for tier in tiers),
            kv_fractions=tuple(float(fraction) for fraction in plan.pools.values()),
            prefill_budget_tokens=plan.prefill.budget_tokens,
            prefill_shares=tuple(float(tier.prefill_share) for tier in tiers),
            retention=tuple(float(factor) for factor in plan.retention_factors),
            slack_fraction=float(plan.slack.slack_fraction),
            low_tier_chunk_share=float(plan.slack.low_tier_chunk_share),
            shed_at=tuple(float(tier.shed.at_fraction) for tier in tiers),
            draft_tokens=tuple(tier.draft_tokens for tier in tiers),
            max_running=tuple(
                UNLIMITED if tier.max_running is None else tier.max_running for tier in tiers
            ),
            max_num_seqs=UNLIMITED if capacity is None else capacity,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Itself: nothing in it can change."""
        return self

    def check_shape(self, plan: Plan) -> None:
        """Refuse an allocation that was made for another plan.

        Raises:
            AllocationError: a knob has too many or too few entries.
        """
        tiers, pools, classes = len(plan.tiers), len(plan.pools), len(plan.retention_names)
        for knob, entries in (
            ("weights", tiers),
            ("kv_fractions", pools),
            ("prefill_shares", tiers),
            ("retention", classes),
            ("shed_at", tiers),
            ("draft_tokens", tiers),
            ("max_running", tiers),
        ):
            found = getattr(self, knob)
            if not isinstance(found, tuple) or len(found) != entries:
                raise AllocationError(
                    "allocation",
                    key=knob,
                    value=found,
                    bound=f"a tuple with {entries} entries",
                    remedy=f"make it for plan {plan.name}",
                )
