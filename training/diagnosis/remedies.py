"""What would mend a trouble, as changes of the plan that a what-if can try before anybody acts.

It knows the plan only as data: nothing here has been tried yet. Where no value of a plan helps
(more engine, a limit at admission) it says so in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trimtab.engine_bridge.plan import Plan
from trimtab.training.diagnosis.signatures import Finding, Signature
from trimtab.training.diagnosis.signs import Signs

Place = tuple[str, ...]

FAIR_POLICY: Final = "static"
"""The policy that runs the fair scheduler on the plan as it is."""
_TARGET_MARGIN: Final = 1.25
_SHIFT: Final = 0.1
_LEAST_POOL: Final = 0.05


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """What to try."""

    changes: Mapping[Place, Any] = field(default_factory=dict)
    """New value by place in the plan; only what differs from the plan."""
    policy: str | None = None
    """The policy to run instead; None: the one that ran."""
    advice: tuple[str, ...] = ()
    """What no value of a plan says."""


def remedy_of(finding: Finding, signs: Signs, plan: Plan) -> Remedy:
    """What to try against a trouble."""
    remedy = _REMEDIES[finding.signature](finding, signs, plan)
    kept = {place: value for place, value in remedy.changes.items() if _value(plan, place) != value}
    policy = remedy.policy
    if policy is None and not signs.fair_rules and finding.signature in _MENDED_BY_RULES:
        policy = FAIR_POLICY
    return Remedy(changes=kept, policy=policy, advice=remedy.advice)


def together(remedies: list[Remedy]) -> Remedy:
    """Several troubles' remedies as one; what is more important comes first and wins."""
    changes: dict[Place, Any] = {}
    for remedy in remedies:
        for place, value in remedy.changes.items():
            changes.setdefault(place, value)
    return Remedy(
        changes=changes,
        policy=next((r.policy for r in remedies if r.policy is not None), None),
        advice=tuple(dict.fromkeys(line for r in remedies for line in r.advice)),
    )


def changed_plan(plan: Plan, changes: Mapping[Place, Any]) -> Plan:
    """The plan with the changes.

    Raises:
        PlanError: the changes contradict the plan.
    """
    content = plan.model_dump(mode="json")
    for place, value in changes.items():
        section = content
        for key in place[:-1]:
            section = section[key]
        section[place[-1]] = value
    return Plan.model_validate(content)


def _value(plan: Plan, place: Place) -> Any:
    section: Any = plan.model_dump(mode="json")
    for key in place:
        section = section[key]
    return section


def _below(tier: str, plan: Plan) -> list[str]:
    """Tiers of less weight."""
    weight = plan.tiers[tier].weight
    return [name for name, other in plan.tiers.items() if other.weight < weight]


def _infeasible(finding: Finding, signs: Signs, plan: Plan) -> Remedy:
    tier, seen = plan.tiers[finding.tier], signs.tiers[finding.tier]
    changes: dict[Place, Any] = {}
    at: Place = ("tiers", finding.tier, "targets")
    for name, alone_ms in (("ttft_ms", seen.alone_needed_ms), ("tpot_ms", seen.alone_tpot_p99_ms)):
        target = getattr(tier.targets, name)
        if target is not None and alone_ms > target:
            changes[(*at, name)] = float(f"{alone_ms * _TARGET_MARGIN:.2g}")
    advice = ["Promise what the engine can do, or serve the tier from a faster one (more GPUs)."]
    if not changes:
        advice.append("The whole answers take too long: promise a longer E2E, or shorter answers.")
    return Remedy(changes=changes, advice=tuple(advice))


def _overload(finding: Finding, signs: Signs, plan: Plan) -> Remedy:
    changes: dict[Place, Any] = {}
    for name in (finding.tier, *_below(finding.tier, plan)):
        tier = plan.tiers[name]
        timed = tier.targets.ttft_ms is not None or tier.targets.e2e_ms is not None
        if timed and tier.shed.mode == "never" and not (name == finding.tier and tier.protected):
            changes["tiers", name, "shed", "mode"] = "refuse"
    if changes:
        changes["rules", "late_shedding"] = True
    crowd = signs.tiers[finding.tier].victims["crowd"]
    return Remedy(
        changes=changes,
        policy=FAIR_POLICY if crowd > 0 and not signs.fair_rules else None,
        advice=(
            "Add engines, or hold the tenants of"
            f" {finding.tier} and the tiers above it to quotas at admission.",
        ),
    )


def _avalanche(finding: Finding, signs: Signs, plan: Plan) -> Remedy:
    changes: dict[Place, Any] = {
        ("rules", "kv_pools"): True,
        ("rules", "backoff"): True,
        ("retention", "eviction"): "scaled_age",
    }
    for name in _below(finding.tier, plan):
        if signs.tiers[name].preempted > 0:
            changes["tiers", name, "backoff"] = True
    already = signs.fair_rules and all(_value(plan, p) == v for p, v in changes.items())
    if already:
        changes.update(_more_for(plan.tiers[finding.tier].pool, plan))
    advice = ("If the pools are right, hold the preempted tier's batch down: max_running.",)
    return Remedy(changes=changes, advice=advice if already else ())


def _more_for(pool: str, plan: Plan) -> dict[Place, Any]:
    """A tenth of the KV blocks more for a pool, from the largest other one that can give it."""
    others = {name: part for name, part in plan.pools.items() if name != pool}
    if not others:
        return {}
    giver = max(others, key=lambda name: others[name])
    shift = min(_SHIFT, others[giver] - _LEAST_POOL)
    if shift <= 0:
        return {}
    return {
        ("pools", pool): round(plan.pools[pool] + shift, 6),
        ("pools", giver): round(others[giver] - shift, 6),
    }


def _poison(finding: Finding, signs: Signs, plan: Plan) -> Remedy:
    remedy = _blocking(finding, signs, plan)
    limits = ", ".join(
        f"tiers.{name}.max_prompt_tokens below {signs.poison_least_tokens}"
        for name in signs.poison_tiers
    )
    return Remedy(
        changes=remedy.changes,
        advice=(f"Refuse such prompts at admission: {limits} in admission.yaml.", *remedy.advice),
    )


def _blocking(finding: Finding, signs: Signs, plan: Plan) -> Remedy:
    changes: dict[Place, Any] = {
        ("rules", rule): True
        for rule in ("prefill_budget", "prefill_shares", "slack_chunk", "feasible_first")
    }
    if plan.tiers[finding.tier].targets.tpot_ms is not None:
        changes["tiers", finding.tier, "protected"] = True
        changes["tiers", finding.tier, "low"] = False
    for name in signs.long_tiers:
        if name in _below(finding.tier, plan) and not plan.tiers[name].protected:
            changes["tiers", name, "low"] = True
    if signs.fair_rules and all(_value(plan, p) == v for p, v in changes.items()):
        changes["slack", "low_tier_chunk_share"] = max(0.01, plan.slack.low_tier_chunk_share / 2)
        changes["prefill", "budget_tokens"] = max(
            plan.prefill.min_chunk_tokens, plan.prefill.budget_tokens // 2
        )
    return Remedy(changes=changes)


def _mismatch(finding: Finding, signs: Signs, plan: Plan) -> Remedy:
    return Remedy(
        changes={("tiers", finding.tier, "draft_tokens"): finding.draft_tokens},
        advice=(
            f"Or serve {finding.tier} from an engine whose draft model fits its traffic"
            " (gateway.yaml: drafts).",
        ),
    )


def _unexplained(finding: Finding, signs: Signs, plan: Plan) -> Remedy:
    return Remedy(
        advice=("Look at the report's curves, and sample a traffic profile: trimtab profile.",)
    )


_REMEDIES: Final = {
    Signature.INFEASIBLE_PLAN: _infeasible,
    Signature.OVERLOAD: _overload,
    Signature.KV_AVALANCHE: _avalanche,
    Signature.POISON_PROMPT: _poison,
    Signature.PREFILL_BLOCKING: _blocking,
    Signature.DRAFT_MISMATCH: _mismatch,
    Signature.UNEXPLAINED: _unexplained,
}
_MENDED_BY_RULES: Final = frozenset(
    {
        Signature.KV_AVALANCHE,
        Signature.POISON_PROMPT,
        Signature.PREFILL_BLOCKING,
        Signature.DRAFT_MISMATCH,
        Signature.UNEXPLAINED,
    }
)
"""Troubles that the fair scheduler's rules are there for."""
