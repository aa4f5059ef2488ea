"""The signs of one run that a diagnosis rests on: a few figures by tier and of the engine.

They are taken from the requests of a replay or a traffic log (`signs_of`); a what-if keeps them in
its JSON. What they mean is `signatures`' business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.report import DraftCounts
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.training.diagnosis.observed import BoolArray, FloatArray, Observed
from trimtab.training.diagnosis.victims import CHURN, Cause, Judged, judge

UNKNOWN: Final = math.nan


@dataclass(frozen=True, kw_only=True)
class TierSigns:
    """One tier. Shares are of its requests unless said otherwise; NaN where nothing is known."""

    requests: int
    missed: float
    """Missed a target or was not served; refused at once does not count."""
    tail: float
    """First token far later than the tier's median, although it could have come sooner."""
    allowed: float
    """Share that may miss by the plan; NaN for a best-effort tier."""
    victims: dict[str, float]
    """Share of the requests that were served badly, by `victims.Cause`, in lower case."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    alone_p50_ms: float
    """Time to first token on an idle engine, of the same requests, with all cached that ever was.
    """
    alone_p99_ms: float
    alone_needed_ms: float
    """The TTFT that an idle engine keeps for all but a quarter of the requests that may miss it."""
    alone_tpot_p99_ms: float
    """Time per output token on an idle engine."""
    load: float
    """Engine time asked for by it and the tiers above it, over time."""
    prompt_p99_tokens: float
    preempted: float
    found: float
    """Prompt tokens found cached, over those that a cache which forgets nothing would have held;
    NaN where nothing repeats."""
    acceptance: float
    """Share of draft tokens that was accepted; NaN without speculation."""
    draft_tokens: float
    """Mean draft length of a decode; NaN without speculation."""
    decode_share: float
    """Part of the engine's decodes that are the tier's; NaN where that is not known."""

    @property
    def badly_served(self) -> float:
        """Share of the requests that were served badly."""
        return sum(self.victims.values())


@dataclass(frozen=True, kw_only=True)
class Signs:
    """One run; the tiers are the plan's, in its order."""

    tiers: dict[str, TierSigns]
    fair_rules: bool
    """Whether the fair scheduler ran, not stock rules."""
    requests: int
    preempted: float
    """Share of the requests that were preempted."""
    churned: float
    """Share of the preempted ones that were preempted twice or more."""
    recomputed: float
    """Tokens computed again after a preemption, over prompt tokens computed; NaN: not known."""
    long_time: float
    """Part of the time in which a long prompt was being computed."""
    longest_alone_ms: float
    """What an idle engine takes for the longest prompt, ms."""
    longest_tokens: int
    """Uncached tokens of that prompt."""
    poison_requests: int
    poison_least_tokens: int
    """Length of the shortest poison prompt; 0 without any."""
    poison_tiers: tuple[str, ...]
    """Tiers that send them."""
    long_tiers: tuple[str, ...]
    """Tiers that send long prompts, most engine time first."""
    batch_mean: float
    """Requests in a step; NaN: not known."""
    kv_tokens_mean: float
    """Context tokens that a step's decodes read, as far as is known; NaN: not known."""


def signs_of(
    seen: Observed,
    plan: Plan,
    spec: EngineSpec,
    *,
    fair_rules: bool,
    telemetry: Sequence[Telemetry] = (),
    counts: Sequence[DraftCounts] = (),
) -> Signs:
    """Take the signs of a run.

    Args:
        seen: Its requests.
        plan: Targets, weights and tiers.
        spec: The engine, as it was set up.
        fair_rules: Whether the fair scheduler ran.
        telemetry: Its intervals; none: the batch is not known.
        counts: What each tier has verified; none: nothing was drafted.

    Raises:
        ValueError: there is no request.
    """
    if not len(seen):
        raise ValueError("no request to take signs of")
    judged = judge(seen, plan, spec)
    names = plan.tier_names
    telemetry = tuple(telemetry)
    drafts = counted_drafts(counts) if counts else [(UNKNOWN,) * 3] * len(names)
    computed = float(seen.uncached_tokens[np.isfinite(seen.first_token_s)].sum())
    preempted = seen.preemptions > 0
    longest = int(np.argmax(judged.alone_ms))
    span_s = max(seen.end_s - float(seen.arrival_s.min()), 1e-9)
    poison_tokens = seen.prompt_tokens[judged.poison]
    return Signs(
        tiers={
            name: _tier(seen, judged, plan, number, drafts[number])
            for number, name in enumerate(names)
        },
        fair_rules=fair_rules,
        requests=len(seen),
        preempted=float(preempted.mean()),
        churned=float((seen.preemptions[preempted] >= CHURN).mean()) if preempted.any() else 0.0,
        recomputed=float(seen.recomputed_tokens.sum()) / computed if computed else 0.0,
        long_time=judged.prefill.length / span_s,
        longest_alone_ms=float(judged.alone_ms[longest]),
        longest_tokens=int(seen.uncached_tokens[longest]),
        poison_requests=int(judged.poison.sum()),
        poison_least_tokens=int(poison_tokens.min()) if len(poison_tokens) else 0,
        poison_tiers=_senders(seen, judged, judged.poison, names),
        long_tiers=_senders(seen, judged, judged.long, names),
        batch_mean=mean([t.batch_mean for t in telemetry]),
        kv_tokens_mean=mean([t.kv_use_fraction * spec.kv_tokens for t in telemetry if t.steps]),
    )


def _tier(
    seen: Observed,
    judged: Judged,
    plan: Plan,
    number: int,
    drafts: tuple[float, float, float],
) -> TierSigns:
    mine = seen.tier == number
    count = int(mine.sum())
    tier = list(plan.tiers.values())[number]
    ttft_ms = (seen.first_token_s - seen.arrival_s)[mine] * 1e3
    victims = {
        cause.name.lower(): float((judged.cause[mine] == cause).mean()) if count else 0.0
        for cause in Cause
        if cause is not Cause.NONE
    }
    return TierSigns(
        requests=count,
        missed=float(judged.missed[mine].mean()) if count else UNKNOWN,
        allowed=UNKNOWN if tier.targets.best_effort else 1.0 - tier.targets.attainment,
        tail=float(judged.tail[mine].mean()) if count else UNKNOWN,
        victims=victims,
        ttft_p50_ms=_quantile(ttft_ms, 0.5),
        ttft_p99_ms=_quantile(ttft_ms, 0.99),
        alone_p50_ms=_quantile(judged.best_ms[mine], 0.5),
        alone_p99_ms=_quantile(judged.best_ms[mine], 0.99),
        alone_needed_ms=_quantile(judged.best_ms[mine], 1.0 - (1.0 - tier.targets.attainment) / 4),
        alone_tpot_p99_ms=_quantile(judged.pace_ms[mine], 0.99),
        load=float(judged.load[number]),
        prompt_p99_tokens=_quantile(seen.prompt_tokens[mine].astype(np.float64), 0.99),
        preempted=float((seen.preemptions[mine] > 0).mean()) if count else UNKNOWN,
        found=_found(seen, mine),
        acceptance=drafts[0],
        draft_tokens=drafts[1],
        decode_share=drafts[2],
    )


def _found(seen: Observed, mine: BoolArray) -> float:
    served = mine & np.isfinite(seen.first_token_s)
    repeated = float(seen.repeated_tokens[served].sum())
    cached = np.minimum(seen.cached_tokens, seen.repeated_tokens)[served]
    return float(cached.sum()) / repeated if repeated > 0 else UNKNOWN


def _senders(
    seen: Observed, judged: Judged, rows: BoolArray, names: tuple[str, ...]
) -> tuple[str, ...]:
    work = np.bincount(seen.tier[rows], weights=judged.alone_ms[rows], minlength=len(names))
    return tuple(names[at] for at in np.argsort(-work, kind="stable") if work[at] > 0)


def counted_drafts(counts: Sequence[DraftCounts]) -> list[tuple[float, float, float]]:
    """By tier: acceptance, mean draft length, and its part of all decodes, as counted."""
    steps = sum(c.steps for c in counts)
    return [
        (c.accepted / c.drafts, c.drafts / c.steps, c.steps / steps)
        if c.drafts and c.steps
        else (UNKNOWN, 0.0, c.steps / steps if steps else 0.0)
        for c in counts
    ]


def mean(values: Sequence[float]) -> float:
    """Mean of the finite values; NaN without any."""
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else UNKNOWN


def _quantile(values: FloatArray, share: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, share)) if len(known) else UNKNOWN


def signs_from_json(content: Mapping[str, Any]) -> Signs:
    """The signs that a what-if's JSON holds, null for NaN.

    Raises:
        KeyError: a figure is missing.
        TypeError: it is no such object.
    """
    tiers = {
        str(name): TierSigns(**_figures(TierSigns, tier)) for name, tier in content["tiers"].items()
    }
    return Signs(**{**_figures(Signs, content), "tiers": tiers})


def _figures(kind: type[Signs] | type[TierSigns], content: Mapping[str, Any]) -> dict[str, Any]:
    def known(value: Any) -> Any:
        if value is None:
            return UNKNOWN
        return tuple(value) if isinstance(value, list) else value

    return {name: known(content[name]) for name in kind.__dataclass_fields__}
