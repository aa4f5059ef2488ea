"""The verdict in plain sentences: who serves most, which promises are kept, what that costs.

One text for the terminal and the page. It says "no clear difference" where the interval does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.training.report import words
from trimtab.training.whatif.compare import reference_label
from trimtab.training.whatif.schema import Difference, WhatIfResult

_GIVES_UP = 0.01
_ONE_POINT = 0.01


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a what-if comes to."""

    headline: str
    others: tuple[str, ...]
    """How the other contenders stand."""
    tiers: tuple[str, ...]
    """One sentence a tier."""
    costs: tuple[str, ...]
    """What the best contender gives up, or the reference where no winner is clear."""
    guards: tuple[str, ...]
    """What the guard of each guarded contender did."""


def verdict(result: WhatIfResult) -> Verdict:
    """Sum up a result that has at least one run."""
    ranked = sorted(result.policies, key=lambda p: -_or_zero(words.weighted(result, p)))
    return Verdict(
        headline=_headline(result, ranked),
        others=_others(result, ranked),
        tiers=_tiers(result),
        costs=_costs(result, _leader(result, ranked)),
        guards=_guards(result),
    )


def _leader(result: WhatIfResult, ranked: list[str]) -> str:
    """The best contender, or the reference where chance may explain its lead."""
    gap = result.difference(ranked[0], "weighted_attainment")
    return ranked[0] if gap is None or gap.settled else gap.against


def _headline(result: WhatIfResult, ranked: list[str]) -> str:
    best = ranked[0]
    share = words.percent(words.weighted(result, best))
    serves = f"{best} serves {share} of the value-weighted demand within its targets"
    if len(ranked) == 1:
        return f"{serves}."
    against = reference_label(result.policies)
    rival = ranked[1] if best == against else against
    gap = result.difference(rival if best == against else best, "weighted_attainment")
    theirs = words.percent(words.weighted(result, rival))
    if gap is None:
        return f"{serves}, {rival} {theirs}."
    flip = best == against
    if gap.settled:
        return f"{serves}, the most of all; {rival} serves {theirs}: {_spoken(gap, flip=flip)}."
    if gap.ci95 == (0.0, 0.0):
        return f"No difference: {serves}, and so does {rival}."
    return (
        f"No clear winner: {serves}, {rival} {theirs}; "
        f"the difference of {_spoken(gap, flip=flip)} may be chance."
    )


def _others(result: WhatIfResult, ranked: list[str]) -> tuple[str, ...]:
    against = reference_label(result.policies)
    told = {ranked[0], ranked[1] if ranked[0] == against else against} if len(ranked) > 1 else set()
    sentences = []
    for policy in ranked[1:]:
        gap = result.difference(policy, "weighted_attainment")
        if policy not in told and gap is not None:
            share = words.percent(words.weighted(result, policy))
            sentences.append(f"{policy} serves {share}: {_stands(gap, against)}.")
    return tuple(sentences)


def _tiers(result: WhatIfResult) -> tuple[str, ...]:
    sentences = []
    for tier in result.tiers:
        shares = {
            policy: share
            for policy in result.policies
            if math.isfinite(share := words.attained(result, policy, tier.name))
        }
        if not shares:
            continue
        who = f"{tier.name} ({words.promise(tier)})"
        if not math.isfinite(tier.target):
            low, high = (pick(shares, key=lambda p: shares[p]) for pick in (min, max))
            span = f"{words.percent(shares[high])} within its targets under {high}"
            if low != high:
                span += f", {words.percent(shares[low])} under {low}"
            sentences.append(f"{who}, best effort: {span}.")
            continue
        told = {p: f"{p} ({words.percent_against(s, tier.target)})" for p, s in shares.items()}
        kept = [told[p] for p, share in shares.items() if share >= tier.target]
        missed = [told[p] for p, share in shares.items() if share < tier.target]
        parts = [
            f"{verb} {_listed(names)}"
            for verb, names in (("kept by", kept), ("missed by", missed))
            if names
        ]
        target = words.percent(tier.target)
        sentences.append(f"{who}, promised to {target}: {'; '.join(parts)}.")
    return tuple(sentences)


def _costs(result: WhatIfResult, best: str) -> tuple[str, ...]:
    if len(result.policies) == 1:
        return ()
    given_up = []
    for tier in result.tiers:
        mine = words.attained(result, best, tier.name)
        rivals = {
            p: s
            for p in result.policies
            if p != best and math.isfinite(s := words.attained(result, p, tier.name))
        }
        if rivals and math.isfinite(mine):
            top = max(rivals, key=lambda p: rivals[p])
            if rivals[top] - mine > _GIVES_UP:
                given_up.append(
                    f"{tier.name} gets {words.percent(mine)}, under {top} "
                    f"{words.percent(rivals[top])}"
                )
    if not given_up:
        lost = f"{best} gives up nothing: no tier does more than a point better elsewhere."
    else:
        lost = f"What {best} gives up: {_listed(given_up)}."
    return (lost, *_price(result, best))


def _price(result: WhatIfResult, best: str) -> tuple[str, ...]:
    against = reference_label(result.policies)
    rival = next((p for p in result.policies if p != best), best) if best == against else against
    for tier in result.tiers:
        mine, theirs = (
            words.of_tier(result, p, tier.name, lambda m: m.cost_per_1k_calls)
            for p in (best, rival)
        )
        if words.dollars(mine) != words.dollars(theirs):
            return (
                f"1,000 finished {tier.name} calls take {words.dollars(mine)} of the engine's "
                f"cost under {best}, {words.dollars(theirs)} under {rival}.",
            )
    return ()


def _guards(result: WhatIfResult) -> tuple[str, ...]:
    sentences = []
    for policy in result.policies:
        facts = [run.guard for run in result.runs(policy) if run.guard is not None]
        intervals = sum(fact.intervals for fact in facts)
        if not intervals:
            continue
        back = words.percent(sum(fact.fell_back for fact in facts) / intervals)
        trips = sum(fact.trips for fact in facts)
        latched = sum(fact.latched for fact in facts)
        end = f", and latched in {latched} of {len(facts)} runs" if latched else ""
        sentences.append(
            f"The guard held {policy} to the static plan in {back} of the control intervals, after "
            f"{trips} trip{'' if trips == 1 else 's'}{end}."
        )
    return tuple(sentences)


def _stands(gap: Difference, against: str) -> str:
    if gap.ci95 == (0.0, 0.0):
        return f"request for request what {against} serves"
    chance = "" if gap.settled else ", which may be chance"
    return f"{_spoken(gap)} against {against}{chance}"


def _spoken(gap: Difference, *, flip: bool = False) -> str:
    mean, (low, high) = gap.mean, gap.ci95
    if flip:
        mean, low, high = -mean, -high, -low
    digits = 2 if abs(mean) < _ONE_POINT else 1
    mean_text, low_text, high_text = (words.signed(x * 100, digits) for x in (mean, low, high))
    return f"{mean_text} points (95 % interval {low_text} to {high_text})"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _or_zero(value: float) -> float:
    return value if math.isfinite(value) else 0.0
