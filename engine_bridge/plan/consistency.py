"""Checks of a plan that need more than one key: names that refer, sums, static values in bounds.

Each check raises the first fault it finds; a single key's own bounds are in its type.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trimtab.engine_bridge.errors import did_you_mean
from trimtab.engine_bridge.plan.section import fault

if TYPE_CHECKING:
    from trimtab.engine_bridge.plan.bounds import AnyBounds
    from trimtab.engine_bridge.plan.schema import Plan

SUM_TOLERANCE = 1e-9


def check(plan: Plan) -> None:
    """Refuse a plan that contradicts itself.

    Raises:
        PydanticCustomError: the first contradiction, made by `section.fault`.
    """
    _names_refer(plan)
    _whole("pools", plan.pools.items(), "")
    shares = ((name, tier.prefill_share) for name, tier in plan.tiers.items())
    _whole("tiers", shares, ".prefill_share")
    _retention_covers(plan)
    _engine_fits(plan)
    _bounds_feasible(plan)
    for key, value, bounds_name, bounds in _static_values(plan):
        if bounds is not None and not bounds.floor <= value <= bounds.ceiling:
            raise fault(
                key,
                value=value,
                bound=f"within {bounds.floor} and {bounds.ceiling}",
                remedy=f"change it, or controller.bounds.{bounds_name}",
            )


def _names_refer(plan: Plan) -> None:
    for name, tier in plan.tiers.items():
        _known(f"tiers.{name}.pool", tier.pool, plan.pools)
    for name in plan.pools:
        if all(tier.pool != name for tier in plan.tiers.values()):
            raise fault(
                f"pools.{name}",
                value=plan.pools[name],
                bound="the pool of a tier",
                remedy="give it a tier or take it out",
            )
    for name, tenant in plan.tenants.items():
        _known(f"tenants.{name}.tier", tenant.tier, plan.tiers)
    for name, retention in plan.retention.classes.items():
        _known(f"retention.classes.{name}.tier", retention.tier, plan.tiers)
    if plan.default_tier is not None:
        _known("default_tier", plan.default_tier, plan.tiers)


def _known(key: str, name: str, names: Iterable[str]) -> None:
    known = list(names)
    if name not in known:
        bound = f"one of {', '.join(known)}"
        raise fault(key, value=name, bound=bound, remedy=did_you_mean(name, known))


def _whole(section: str, fractions: Iterable[tuple[str, float]], suffix: str) -> None:
    total = math.fsum(fraction for _, fraction in fractions)
    if abs(total - 1) > SUM_TOLERANCE:
        shown = float(f"{total:.12g}")
        key = f"{section}.*{suffix}"
        raise fault(key, value=shown, bound="1 in sum", remedy=f"divide each by {shown}")


def _retention_covers(plan: Plan) -> None:
    classes = plan.retention.classes
    for name in plan.tiers if classes else ():
        if not any(c.tier == name and c.detail == 0 for c in classes.values()):
            raise fault(
                "retention.classes",
                value=list(classes),
                bound=f"complete: tier {name} has no catch-all class",
                remedy=f"add {name}: {{tier: {name}, factor: 1.0}}",
            )


def _engine_fits(plan: Plan) -> None:
    prefill, limit = plan.prefill, plan.engine.max_num_batched_tokens
    if prefill.min_chunk_tokens > prefill.budget_tokens:
        raise fault(
            "prefill.min_chunk_tokens",
            value=prefill.min_chunk_tokens,
            bound=f"at most prefill.budget_tokens, {prefill.budget_tokens}",
        )
    if limit is not None and prefill.budget_tokens > limit:
        raise fault(
            "prefill.budget_tokens",
            value=prefill.budget_tokens,
            bound=f"at most engine.max_num_batched_tokens, {limit}",
        )


def _bounds_feasible(plan: Plan) -> None:
    bounds = plan.controller.bounds
    for knob, shares, count in (
        ("kv_fractions", bounds.kv_fractions, len(plan.pools)),
        ("prefill_shares", bounds.prefill_shares, len(plan.tiers)),
    ):
        key = f"controller.bounds.{knob}"
        if shares.floor * count > 1:
            raise fault(f"{key}.floor", value=shares.floor, bound=f"at most 1/{count}")
        if shares.ceiling * count < 1:
            raise fault(f"{key}.ceiling", value=shares.ceiling, bound=f"at least 1/{count}")


def _static_values(plan: Plan) -> Iterable[tuple[str, float, str, AnyBounds | None]]:
    """Key, static value, bounds' name and bounds of every knob; a cap of null has no value."""
    bounds, prefill, slack = plan.controller.bounds, plan.prefill, plan.slack
    for name, tier in plan.tiers.items():
        key = f"tiers.{name}"
        yield f"{key}.weight", tier.weight, "weights", bounds.weights
        yield f"{key}.prefill_share", tier.prefill_share, "prefill_shares", bounds.prefill_shares
        yield f"{key}.shed.at_fraction", tier.shed.at_fraction, "shed_at", bounds.shed_at
        yield f"{key}.draft_tokens", tier.draft_tokens, "draft_tokens", bounds.draft_tokens
        if tier.max_running is not None:
            yield f"{key}.max_running", tier.max_running, "max_running", bounds.max_running
    for name, fraction in plan.pools.items():
        yield f"pools.{name}", fraction, "kv_fractions", bounds.kv_fractions
    budget = bounds.prefill_budget_tokens
    yield "prefill.budget_tokens", prefill.budget_tokens, "prefill_budget_tokens", budget
    for name, factor in zip(plan.retention_names, plan.retention_factors, strict=True):
        yield f"retention.classes.{name}.factor", factor, "retention", bounds.retention
    yield "slack.slack_fraction", slack.slack_fraction, "slack_fraction", bounds.slack_fraction
    low = bounds.low_tier_chunk_share
    yield "slack.low_tier_chunk_share", slack.low_tier_chunk_share, "low_tier_chunk_share", low
    if plan.engine.max_num_seqs is not None:
        cap = bounds.max_num_seqs
        yield "engine.max_num_seqs", plan.engine.max_num_seqs, "max_num_seqs", cap
