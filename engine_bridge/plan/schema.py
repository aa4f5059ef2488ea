"""The plan itself: what each tier is promised, the static shares, the bounds of the controller.

The order of `tiers`, `pools` and `retention.classes` is the order of every array about them. A plan
describes no engine in detail: that is `trimtab.engine_bridge.engine_spec`.
"""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from typing import Annotated, Self

from pydantic import Field, model_validator

from trimtab.engine_bridge.errors import PlanError, did_you_mean
from trimtab.engine_bridge.plan import consistency
from trimtab.engine_bridge.plan.bounds import Controller
from trimtab.engine_bridge.plan.retention import Retention
from trimtab.engine_bridge.plan.section import (
    Fraction,
    Name,
    PositiveCount,
    PositiveFraction,
    PositiveMs,
    Section,
    Text,
)
from trimtab.engine_bridge.plan.tiers import Tenant, Tier

MAX_TIERS = 8
SECTIONS_SINCE: tuple[str, ...] = ("aging", "isolation")
"""Sections that plans have not always had. At their defaults they change nothing, and the digest
leaves them out, so that policies trained under an older plan still fit it."""
TIER_FIELDS_SINCE: tuple[str, ...] = ("slice_tokens", "interactive")
"""Likewise, fields of a tier."""
FEASIBLE_FIELDS_SINCE: tuple[str, ...] = ("prefill_factor", "chunks")
"""Likewise, fields of rule 14."""
TENANT_FIELDS_SINCE: tuple[str, ...] = ("interactive",)
"""Likewise, fields of a tenant."""
TenantName = Annotated[str, Field(min_length=1, max_length=200)]
Wait = Annotated[float, Field(ge=0, le=1e9)]


class Prefill(Section):
    """Rule 4: how much prefill a step may add to the running decodes."""

    budget_tokens: PositiveCount
    """Most prefill tokens in a step."""
    min_chunk_tokens: PositiveCount
    """Rule 13 cuts the step's prefill no smaller than this, so that prompts always advance."""


class Rules(Section):
    """Switches of the fair scheduler's rules, so that each one's worth can be measured."""

    prefill_budget: bool
    """Rule 4: hold the step's prefill to the budget. Off: to the engine's own token limit."""
    prefill_shares: bool
    """Rule 4: hold each tier to its share of the budget while the others use theirs."""
    kv_pools: bool
    """Rules 5 and 6: guarantee each pool its fraction of the KV blocks."""
    backoff: bool
    """Rule 8: delay the re-admission of preempted requests of back-off tiers."""
    slack_chunk: bool
    """Rule 13: size the step's prefill by the slack of the protected tiers' token deadlines."""
    feasible_first: bool
    """Rule 14: within a window, first those that can still meet their TTFT."""
    late_shedding: bool
    """Rule 15: give up requests that can no longer meet their target, as their tier says."""
    cap_preemption: bool
    """A request of a higher tier that finds the batch full takes the place of a lower one."""
    true_up: bool
    """Rule 2: replace the predicted cost by the real one as a request runs."""


class Backoff(Section):
    """Rule 8: a preempted request waits min(max_ms, per_waiting_ms x queue length)."""

    per_waiting_ms: Wait
    """Milliseconds for each waiting request."""
    max_ms: Wait
    """Longest delay, milliseconds."""


class Slack(Section):
    """Rule 13: a step lasts at most max(tpot_fraction x TPOT, slack_fraction x slack saved up)."""

    slack_fraction: Fraction
    """Part of the saved-up slack that one step may spend."""
    tpot_fraction: Annotated[float, Field(gt=0, le=10)]
    """Part of the TPOT target that a step may always take."""
    low_tier_chunk_share: PositiveFraction
    """Part of the prefill budget that all low tiers together may use."""


class Feasible(Section):
    """Rule 14: how far from pure fair queueing the order may stray."""

    window_ms: Wait
    """Requests whose virtual start is at most this above the least one may be reordered; in engine
    milliseconds of the request's own account (service over weight). 0: pure fair queueing."""
    prefill_factor: Wait | None = None
    """Among them, those that can still meet their TTFT go in the order of virtual start plus so
    many times the prefill (over the share): a short prompt passes another tenant's longer one only
    as far as their lengths differ. null: shortest prefill first, whatever the starts."""
    chunks: bool = False
    """Prompts that are being read are part of it, chunk by chunk: one that can no longer meet its
    TTFT, or has none, no longer holds up the rest of its tier."""


class Aging(Section):
    """Ageing: a waiting request counts as earlier, inside windows that rule 3's bound contains.

    The windows are in engine milliseconds of the level's own accounts (service over weight, or over
    share). No account knows of it, so long-run shares stay.
    """

    tier_window_ms: Wait = 0.0
    """Most that a request can gain on the other tiers. 0: tiers do not age."""
    tenant_window_ms: Wait = 0.0
    """Most that it can gain on its tier's other tenants. 0: they do not age."""
    interactive_bonus: Fraction = 0.0
    """Part of the windows that a request of an interactive tier or tenant has gained at once."""
    full_after_s: Annotated[float, Field(gt=0, le=1e9)] = 10.0
    """Seconds of waiting that gain the whole windows, in even steps."""
    due_every: PositiveCount = 8
    """Rule 14 lets a request with the whole lead go before those that can still meet their TTFT,
    in one of so many starts of its tier at most."""


class Isolation(Section):
    """Rule 16: what a tenant with little of the work is spared of its neighbours' prefill."""

    longest_step_ms: PositiveMs | None = None
    """Prefill makes no step longer than this by the step-time model, so that nobody who comes
    waits longer for the step that runs. Spared prompts may; they go before their tier's other ones,
    and nearly alone. null: rule 16 is off."""
    spared_fraction: Fraction = 0.25
    """A prompt is spared if its tenant has at most this part of the tokens in the engine and its
    queue when it comes, this prompt's included."""


class Prediction(Section):
    """Rule 2: how the output length of a request is predicted before it is known."""

    output_quantile: Annotated[float, Field(gt=0, lt=1)]
    """Quantile of the tenant's past output lengths that is taken for the prediction."""
    initial_output_tokens: PositiveCount
    """Prediction for a tenant without a past, tokens."""


class Engine(Section):
    """What the operator set at the engine's start; null: the engine's own."""

    max_num_seqs: PositiveCount | None = None
    """Most requests in a batch: the start-up capacity that no later cap can exceed."""
    max_num_batched_tokens: PositiveCount | None = None
    """Most tokens in a step."""
    cost_per_hour: Annotated[float, Field(ge=0, le=1e9)] | None = None
    """What the whole engine costs for an hour, USD."""


class Metrics(Section):
    """What the engine's metrics show beyond the tiers."""

    top_tenants: Annotated[int, Field(ge=0, le=100)] = 0
    """So many tenants with the most service are shown by name. 0: none is, whatever their number;
    names of tenants then appear in no metric."""


class Plan(Section):
    """What an operator promises to each tier, and the static shares to fall back on."""

    name: Name
    """Short name, for tables and reports."""
    description: Text = ""
    """What the plan is for, for people."""
    tiers: Annotated[dict[Name, Tier], Field(min_length=1, max_length=MAX_TIERS)]
    """Service classes in order; the first is the default in tables, not in scheduling."""
    pools: Annotated[dict[Name, PositiveFraction], Field(min_length=1, max_length=MAX_TIERS)]
    """KV pools in order, each with its guaranteed fraction of the blocks; they sum to 1."""
    tenants: dict[TenantName, Tenant] = Field(default_factory=dict)
    """Tenants with a tier or share of their own."""
    default_tenant_share: Annotated[float, Field(ge=1e-6, le=1e6)] = 1.0
    """Share of a tenant that `tenants` does not name."""
    default_tier: Name | None = None
    """Tier of a tenant that `tenants` does not name, where the traffic does not say. null: none."""
    prefill: Prefill
    """Rule 4."""
    retention: Retention = Retention()
    """Rule 7."""
    rules: Rules
    """Switches of the rules."""
    backoff: Backoff
    """Rule 8."""
    slack: Slack
    """Rule 13."""
    feasible: Feasible
    """Rule 14."""
    aging: Aging = Aging()
    """Ageing of those that wait."""
    isolation: Isolation = Isolation()
    """Rule 16."""
    prediction: Prediction
    """Rule 2."""
    vft_skew_fraction: Annotated[float, Field(gt=0, le=1000)]
    """Rule 12: a finish whose virtual time is off by more than this fraction is flagged."""
    engine: Engine = Engine()
    """Limits of the engine."""
    controller: Controller
    """Interval, lease and bounds of the controller."""
    metrics: Metrics = Metrics()
    """What the engine's metrics show beyond the tiers."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        consistency.check(self)
        return self

    @cached_property
    def tier_names(self) -> tuple[str, ...]:
        """Names of the tiers, in order."""
        return tuple(self.tiers)

    @cached_property
    def pool_names(self) -> tuple[str, ...]:
        """Names of the pools, in order."""
        return tuple(self.pools)

    @cached_property
    def pool_of_tier(self) -> tuple[int, ...]:
        """Index of each tier's pool, in the order of the tiers."""
        return tuple(self.pool_names.index(tier.pool) for tier in self.tiers.values())

    @cached_property
    def retention_names(self) -> tuple[str, ...]:
        """Names of the retention classes, in order; without any, one class a tier."""
        return tuple(self.retention.classes) or self.tier_names

    @cached_property
    def retention_factors(self) -> tuple[float, ...]:
        """Factor of each retention class, in order."""
        classes = self.retention.classes.values()
        return tuple(c.factor for c in classes) or (1.0,) * len(self.tiers)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all but words and metrics: equal digests, equal behaviour."""
        content = self.model_dump(mode="json", exclude={"description": True, "metrics": True})
        _drop_defaults(self, content, SECTIONS_SINCE)
        _drop_defaults(self.feasible, content["feasible"], FEASIBLE_FIELDS_SINCE)
        for name, tier in content["tiers"].items():
            del tier["description"]
            _drop_defaults(self.tiers[name], tier, TIER_FIELDS_SINCE)
        for name, tenant in content["tenants"].items():
            _drop_defaults(self.tenants[name], tenant, TENANT_FIELDS_SINCE)
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def tier_index(self, name: str) -> int:
        """Position of a tier in every array over tiers.

        Raises:
            PlanError: the plan has no such tier.
        """
        if name not in self.tiers:
            known = ", ".join(self.tiers)
            remedy = did_you_mean(name, self.tiers)
            raise PlanError(
                f"plan {self.name}", key="tiers", value=name, bound=f"one of {known}", remedy=remedy
            )
        return self.tier_names.index(name)

    def tenant_share(self, tenant: str) -> float:
        """Share of a tenant inside its tier."""
        known = self.tenants.get(tenant)
        return self.default_tenant_share if known is None else known.share

    def tenant_bonus(self, tenant: str, tier: int) -> float:
        """Part of the ageing windows that a tenant's requests have at once in that tier."""
        known = self.tenants.get(tenant)
        interactive = None if known is None else known.interactive
        if interactive is None:
            interactive = self.tiers[self.tier_names[tier]].interactive
        return self.aging.interactive_bonus if interactive else 0.0

    def retention_class(self, tier: int, stop_reason: str, reused: bool) -> int:
        """Index of the retention class of a cached block.

        Args:
            tier: Index of the tier that left the block.
            stop_reason: Why that request ended; empty where it is not known.
            reused: Whether the block was ever hit again.

        Returns:
            The class that matches and asks for most marks, of several the first.
        """
        name = self.tier_names[tier]
        if not self.retention.classes:
            return tier
        matching = [
            (-c.detail, i)
            for i, c in enumerate(self.retention.classes.values())
            if c.matches(name, stop_reason, reused)
        ]
        return min(matching)[1]


def _drop_defaults(section: Section, content: dict[str, object], names: tuple[str, ...]) -> None:
    for name in names:
        field = type(section).model_fields[name]
        if getattr(section, name) == field.get_default(call_default_factory=True):
            del content[name]
