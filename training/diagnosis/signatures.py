"""Which of six known troubles a run shows, by its signs: the decision tree of docs/diagnose.md.

A tier is *hurt* if more of its requests miss than its plan allows, or if more than 1 % of its first
tokens come far too late. The victims of a hurt tier say which trouble it is. A draft length that
costs more than it gives is a trouble of its own, whether or not somebody is late. It proposes
nothing (`remedies`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.rules.speculation import (
    drafting_ms,
    tokens_per_step,
    verified_step_ms,
)
from trimtab.training.diagnosis.signs import Signs, TierSigns
from trimtab.training.diagnosis.victims import MOSTLY, Cause
from trimtab.training.report.words import milliseconds, number, percent

TAIL_SHARE: Final = 0.01
"""Share of far too late first tokens from which on a tier's P99 is one of them."""
LEAST_SHARE: Final = 0.2
"""A trouble is named if so much of a hurt tier's victims show it."""
DRAFT_LOSS: Final = 0.03
"""Part of the throughput that drafts must cost against shorter ones, or none, to be named."""


_ROUNDS: Final = 40
_PROBING: Final = 0.5


class Signature(enum.StrEnum):
    """The known troubles; a closed set."""

    INFEASIBLE_PLAN = "infeasible_plan"
    OVERLOAD = "overload"
    KV_AVALANCHE = "kv_avalanche"
    POISON_PROMPT = "poison_prompt"
    PREFILL_BLOCKING = "prefill_blocking"
    DRAFT_MISMATCH = "draft_mismatch"
    UNEXPLAINED = "unexplained"


_OF_CAUSE: Final = {
    Cause.BEYOND: Signature.INFEASIBLE_PLAN,
    Cause.OVERLOAD: Signature.OVERLOAD,
    Cause.RECOMPUTE: Signature.KV_AVALANCHE,
    Cause.POISON: Signature.POISON_PROMPT,
    Cause.PREFILL: Signature.PREFILL_BLOCKING,
    Cause.CROWD: Signature.OVERLOAD,
    Cause.OTHER: Signature.UNEXPLAINED,
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One trouble of one tier."""

    signature: Signature
    tier: str
    """The tier that is hurt, or whose drafts do not pay."""
    share: float
    """Share of the tier's requests that it explains; of throughput, for a draft mismatch."""
    evidence: tuple[str, ...]
    """Sentences with the figures."""
    draft_tokens: int | None = None
    """The draft length that would pay best, for a draft mismatch."""


def findings(signs: Signs, plan: Plan, spec: EngineSpec) -> tuple[Finding, ...]:
    """The troubles of a run, the most important first; none for a healthy one.

    A draft mismatch comes first, then the troubles of the tiers by weight, then by share.
    """
    found = list(_mismatches(signs, spec))
    order = sorted(signs.tiers, key=lambda name: -plan.tiers[name].weight)
    for name in order:
        tier = signs.tiers[name]
        if not _hurt(tier):
            continue
        named = dict.fromkeys(_OF_CAUSE.values(), 0.0)
        for cause, signature in _OF_CAUSE.items():
            named[signature] += tier.victims[cause.name.lower()]
        for signature in sorted(named, key=lambda signature: _rank(signature, named)):
            # What nothing explains is worth a word only where it is most of the trouble.
            least = MOSTLY if signature is Signature.UNEXPLAINED else LEAST_SHARE
            if named[signature] > 0 and named[signature] >= least * tier.badly_served:
                found.append(_finding(signature, name, named[signature], signs, plan))
    return tuple(found)


def _rank(signature: Signature, named: Mapping[Signature, float]) -> tuple[float, float]:
    """The largest first; but where poison is to be named, before the other long prompts."""
    blocking = named[Signature.POISON_PROMPT] + named[Signature.PREFILL_BLOCKING]
    if signature is Signature.POISON_PROMPT and named[signature] >= LEAST_SHARE * blocking:
        return -blocking, 0.0
    return -named[signature], 1.0


def _hurt(tier: TierSigns) -> bool:
    return tier.badly_served > 0 and (tier.missed > tier.allowed or tier.tail > TAIL_SHARE)


def _finding(signature: Signature, name: str, share: float, signs: Signs, plan: Plan) -> Finding:
    tier = signs.tiers[name]
    head = f"{percent(share)} of {name}'s requests were served badly for this reason"
    if math.isfinite(tier.ttft_p50_ms):
        head += (
            f" (TTFT P50 {milliseconds(tier.ttft_p50_ms)}, P99 {milliseconds(tier.ttft_p99_ms)};"
            f" on an idle engine {milliseconds(tier.alone_p50_ms)} and"
            f" {milliseconds(tier.alone_p99_ms)})"
        )
    told = _EVIDENCE[signature](tier, name, signs, plan)
    return Finding(signature=signature, tier=name, share=share, evidence=(f"{head}.", *told))


def _infeasible(tier: TierSigns, name: str, signs: Signs, plan: Plan) -> tuple[str, ...]:
    targets = plan.tiers[name].targets
    told = []
    if targets.ttft_ms is not None and tier.alone_p99_ms > targets.ttft_ms:
        told.append(
            f"An idle engine takes up to {milliseconds(tier.alone_p99_ms)} (P99) to the first"
            f" token; the plan promises {milliseconds(targets.ttft_ms)}."
        )
    if targets.tpot_ms is not None and tier.alone_tpot_p99_ms > targets.tpot_ms:
        told.append(
            f"An idle engine takes {milliseconds(tier.alone_tpot_p99_ms)} a token; the plan"
            f" promises {milliseconds(targets.tpot_ms)}."
        )
    return tuple(told)


def _overload(tier: TierSigns, name: str, signs: Signs, plan: Plan) -> tuple[str, ...]:
    told = [f"{name} and the tiers above it ask for {number(tier.load)} of the engine's time"]
    if tier.victims["overload"] > 0:
        told.append(
            f"For {percent(tier.victims['overload'])} of {name}'s requests that work alone was"
            " further behind than the target allows: no order of service helps them."
        )
    if tier.victims["crowd"] > 0:
        told.append(
            f"For {percent(tier.victims['crowd'])} only all tiers' work together was: they waited"
            " behind others' requests."
        )
    return (f"{told[0]} on average.", *told[1:])


def _avalanche(tier: TierSigns, name: str, signs: Signs, plan: Plan) -> tuple[str, ...]:
    told = (
        f"{percent(signs.preempted)} of all requests were preempted, and {percent(signs.churned)}"
        " of those twice or more"
    )
    if math.isfinite(signs.recomputed):
        told += f"; {percent(signs.recomputed)} of the computed prompt tokens were computed again"
    lines = [f"{told}."]
    if math.isfinite(tier.found):
        lines.append(f"{name} found {percent(tier.found)} of what it had sent before still cached.")
    return tuple(lines)


def _poison(tier: TierSigns, name: str, signs: Signs, plan: Plan) -> tuple[str, ...]:
    return (
        f"{signs.poison_requests} prompt(s) of {signs.poison_least_tokens:,} tokens or more, from"
        f" {_named(signs.poison_tiers)}; an idle engine takes"
        f" {milliseconds(signs.longest_alone_ms)} for the longest.",
    )


def _blocking(tier: TierSigns, name: str, signs: Signs, plan: Plan) -> tuple[str, ...]:
    return (
        f"They waited mostly while much longer prompts were computed; such prompts, from"
        f" {_named(signs.long_tiers)}, were being computed {percent(signs.long_time, 0)} of the"
        f" time, the longest of {signs.longest_tokens:,} tokens.",
    )


def _unexplained(tier: TierSigns, name: str, signs: Signs, plan: Plan) -> tuple[str, ...]:
    return ("None of the known signatures explains them.",)


_EVIDENCE: Final = {
    Signature.INFEASIBLE_PLAN: _infeasible,
    Signature.OVERLOAD: _overload,
    Signature.KV_AVALANCHE: _avalanche,
    Signature.POISON_PROMPT: _poison,
    Signature.PREFILL_BLOCKING: _blocking,
    Signature.UNEXPLAINED: _unexplained,
}


def _named(tiers: tuple[str, ...]) -> str:
    return " and ".join(tiers) if tiers else "no tier"


@dataclass(frozen=True)
class _Drafting:
    """What one tier's decodes do in a mean step."""

    decodes: float
    acceptance: float
    """Of a first draft token."""
    length: int


def _mismatches(signs: Signs, spec: EngineSpec) -> tuple[Finding, ...]:
    """Draft lengths that cost the batch more than `DRAFT_LOSS` of what a shorter one gives."""
    if not (math.isfinite(signs.batch_mean) and math.isfinite(signs.kv_tokens_mean)):
        return ()
    tiers = {
        name: _drafting(tier, signs.batch_mean, spec)
        for name, tier in signs.tiers.items()
        if math.isfinite(tier.decode_share)
    }
    found = []
    for name, used in tiers.items():
        if not used.length:
            continue
        rates = [
            _rate({**tiers, name: replace(used, length=length)}, signs.kv_tokens_mean, spec)
            for length in range(used.length + 1)
        ]
        best = int(np.argmax(rates))
        loss = 1.0 - rates[used.length] / rates[best]
        if loss <= DRAFT_LOSS:
            continue
        accepted = percent(signs.tiers[name].acceptance, 0)
        told = (
            f"Of {name}'s drafts of {used.length} tokens {accepted} are accepted. In a batch of"
            f" {number(signs.batch_mean)} that gives {percent(loss)} fewer tokens a second than"
            + (f" drafts of {best}." if best else " no drafts at all."),
        )
        found.append(
            Finding(
                signature=Signature.DRAFT_MISMATCH,
                tier=name,
                share=loss,
                evidence=told,
                draft_tokens=best,
            )
        )
    return tuple(sorted(found, key=lambda finding: -finding.share))


def _drafting(tier: TierSigns, batch: float, spec: EngineSpec) -> _Drafting:
    # Less than half a token a step on average is a tier that probes.
    length = round(tier.draft_tokens) if tier.draft_tokens >= _PROBING else 0
    kept = 1.0 if spec.draft is None else spec.draft.kept
    acceptance = _first_acceptance(tier.acceptance, kept, length) if length else 0.0
    return _Drafting(batch * tier.decode_share, acceptance, length)


def _rate(tiers: Mapping[str, _Drafting], kv_tokens: float, spec: EngineSpec) -> float:
    """Tokens a millisecond of a step whose tiers verify drafts of these lengths."""
    draft = spec.draft
    kept = 1.0 if draft is None else draft.kept
    decodes = sum(tier.decodes for tier in tiers.values())
    drafts = sum(tier.decodes * tier.length for tier in tiers.values())
    tokens = sum(
        tier.decodes * tokens_per_step(tier.acceptance, kept, tier.length)
        for tier in tiers.values()
    )
    ms = verified_step_ms(spec.coef, np.array([decodes, kv_tokens, 0.0, 0.0, 0.0, 0.0]), drafts)
    if draft is not None:
        longest = max(tier.length for tier in tiers.values())
        ms += drafting_ms(draft.us_per_token, draft.pass_ms, drafts, float(longest))
    return float(tokens / ms)


def _first_acceptance(share: float, kept: float, length: int) -> float:
    """Acceptance of a first draft token, where `share` of all drafts of a length are right.

    A draft token is right only if all before it are, so the share is less. By bisection.
    """
    low, high = 0.0, 1.0
    for _ in range(_ROUNDS):
        middle = 0.5 * (low + high)
        right = tokens_per_step(middle, kept, length) - 1.0
        low, high = (middle, high) if right < share * length else (low, middle)
    return 0.5 * (low + high)
