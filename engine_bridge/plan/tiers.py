"""The sections of a plan that describe who is served: tiers, their targets, tenants.

What is shared between the tiers (pools, retention, budgets) is not here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trimtab.engine_bridge.plan.section import (
    LARGEST_COUNT,
    Count,
    Name,
    PositiveCount,
    PositiveFraction,
    PositiveMs,
    Section,
    Text,
    fault,
)


class Targets(Section):
    """What a tier's requests are promised; a request meets it if it meets every target given."""

    ttft_ms: PositiveMs | None = None
    """Time to first token, milliseconds. null: not promised."""
    tpot_ms: PositiveMs | None = None
    """Time per output token after the first, milliseconds. null: not promised."""
    e2e_ms: PositiveMs | None = None
    """Time to the last token, milliseconds. null: not promised."""
    attainment: PositiveFraction = 0.99
    """Share of the requests that must meet the targets, in (0, 1]."""
    best_effort: bool = False
    """The targets are a wish: missing them breaks no promise."""


class Shed(Section):
    """Rule 15: what happens to a request that can no longer meet its target."""

    mode: Literal["never", "refuse", "demote"] = "never"
    """never: it waits on; refuse: it is answered with an error; demote: it goes to the back."""
    at_fraction: Annotated[float, Field(gt=0, le=10)] = 1.0
    """It is given up when it has waited for this multiple of the TTFT target (of the E2E target
    where there is no TTFT target). Below 1 leaves time for its prefill."""


class Tier(Section):
    """One service class."""

    description: Text = ""
    """Who is in it, for people."""
    weight: Annotated[float, Field(ge=1e-6, le=1e6)]
    """Share of the engine's time against the other tiers' weights, when all of them wait."""
    value: Annotated[float, Field(ge=0, le=1e9)] = 1.0
    """Worth of a token against the other tiers' tokens, for weighted goodput and attainment; an
    output token counts three fresh prompt tokens, a repeated one a tenth (`envs.score`)."""
    pool: Name
    """KV pool that the tier's running requests draw from."""
    prefill_share: PositiveFraction
    """Part of the prefill budget that is the tier's own; all tiers' sum to 1."""
    targets: Targets = Targets()
    """What the tier's requests are promised."""
    protected: bool = False
    """Rule 13 cuts the step's prefill so that this tier's token deadlines hold."""
    low: bool = False
    """Rule 13 holds the low tiers' prefill together under `slack.low_tier_chunk_share`."""
    backoff: bool = False
    """Rule 8 delays the tier's preempted requests."""
    interactive: bool = False
    """Somebody watches its answers come: they have `aging.interactive_bonus` at once."""
    shed: Shed = Shed()
    """Rule 15 for this tier."""
    max_running: PositiveCount | None = None
    """Most requests of the tier in a batch. null: only the engine's own limit."""
    slice_tokens: Annotated[int, Field(ge=1024, le=LARGEST_COUNT)] | None = None
    """Gateway: a longer prompt is read in growing prefixes, so many tokens at a time, before the
    request itself. null: none is."""
    draft_tokens: Annotated[Count, Field(le=64)] = 0
    """Draft length under speculation (rule 9); 0 turns it off."""
    price_per_1m_tokens: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """What a tenant pays for a million output tokens, USD. null: not stated."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        targets = self.targets
        if self.protected and targets.tpot_ms is None:
            raise fault(
                "targets.tpot_ms",
                value=None,
                bound="given for a protected tier",
                remedy="state a TPOT target or set protected: false",
            )
        if self.protected and self.low:
            raise fault("low", value=True, bound="false for a protected tier")
        if self.shed.mode != "never" and targets.ttft_ms is None and targets.e2e_ms is None:
            raise fault(
                "shed.mode",
                value=self.shed.mode,
                bound="never for a tier without a TTFT or E2E target",
                remedy="state targets.ttft_ms or targets.e2e_ms",
            )
        promised = (targets.ttft_ms, targets.tpot_ms, targets.e2e_ms)
        if not targets.best_effort and promised == (None, None, None):
            raise fault(
                "targets",
                value="no target",
                bound="at least one of ttft_ms, tpot_ms, e2e_ms",
                remedy="state one or set targets.best_effort: true",
            )
        return self


class Tenant(Section):
    """One customer of a tier."""

    tier: Name
    """Tier that its requests belong to."""
    share: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Share of the tier's service against the shares of its other tenants."""
    interactive: bool | None = None
    """As the tier's field of that name, for this tenant alone. null: as the tier."""
