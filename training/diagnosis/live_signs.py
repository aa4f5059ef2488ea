"""Signs from an engine's metrics alone: coarser than from its requests, and at hand at once.

Metrics hold sums over requests, not requests. So a tier's victims are all laid at one door, and a
tier's prompts are known by their mean in an interval only. A traffic log says more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry
from trimtab.envs import score
from trimtab.training.diagnosis.alone import tpot_alone_ms, ttft_alone_ms
from trimtab.training.diagnosis.observed import BoolArray, FloatArray, Observed
from trimtab.training.diagnosis.signs import UNKNOWN, Signs, TierSigns, mean
from trimtab.training.diagnosis.victims import (
    LONG_FACTOR,
    LONG_MS,
    MOSTLY,
    POISON_FACTOR,
    POISON_MS,
    RECOMPUTED,
    Cause,
)

BUSY: Final = 0.97
"""Busy part of an interval from which on an engine has no time left."""
OFTEN: Final = 0.1
"""Part of the intervals from which on something is often so."""


def live_signs(telemetry: Sequence[Telemetry], plan: Plan, spec: EngineSpec) -> Signs:
    """Take the signs of a stretch of telemetry.

    Args:
        telemetry: Intervals of one engine, oldest first; at least one.
        plan: The engine's plan.
        spec: The engine.

    Raises:
        ValueError: there is no interval, or nothing arrived in them.
    """
    if not any(tier.arrivals for t in telemetry for tier in t.tiers):
        raise ValueError("nothing arrived")
    sums = [_Tier(telemetry, number, spec) for number in range(len(plan.tiers))]
    preemptions = sum(tier.preemptions for tier in sums)
    requests = sum(tier.arrivals for tier in sums)
    computed = sum(tier.prefill_tokens for tier in sums)
    recomputed = sum(tier.recomputed_tokens for tier in sums)
    churn = recomputed > RECOMPUTED * computed and preemptions > 0
    ttft_ms = score.targets(plan).ttft_ms
    strictest_ms = float(ttft_ms.min()) if np.isfinite(ttft_ms).any() else 0.0
    poison_ms = max(POISON_FACTOR * strictest_ms, POISON_MS)
    longest = max(sums, key=lambda tier: tier.longest_ms)
    poisoners = [tier for tier in sums if tier.longest_ms > poison_ms]
    full = np.array([t.busy_fraction >= BUSY for t in telemetry])
    tiers = {}
    for name, own in zip(plan.tier_names, sums, strict=True):
        cause = Cause.OTHER
        targets = plan.tiers[name].targets
        if own.beyond(targets.ttft_ms, targets.tpot_ms):
            cause = Cause.BEYOND
        elif _behind(own, sums, plan, spec, full):
            cause = Cause.OVERLOAD
        elif churn:
            cause = Cause.RECOMPUTE
        elif any(tier is not own for tier in poisoners):
            cause = Cause.POISON
        elif longest.longest_ms >= max(LONG_MS, LONG_FACTOR * own.alone_ms):
            cause = Cause.PREFILL
        tiers[name] = own.signs(plan, name, cause, _load(own, sums, plan))
    return Signs(
        tiers=tiers,
        fair_rules=True,
        requests=requests,
        preempted=preemptions / requests,
        churned=UNKNOWN,
        recomputed=recomputed / computed if computed else 0.0,
        long_time=UNKNOWN,
        longest_alone_ms=longest.longest_ms,
        longest_tokens=round(longest.longest_tokens),
        poison_requests=len(poisoners),
        poison_least_tokens=round(min((t.longest_tokens for t in poisoners), default=0)),
        poison_tiers=tuple(plan.tier_names[t.number] for t in poisoners),
        long_tiers=tuple(plan.tier_names[t.number] for t in sums if t.longest_ms >= LONG_MS),
        batch_mean=mean([t.batch_mean for t in telemetry]),
        kv_tokens_mean=mean([t.kv_use_fraction * spec.kv_tokens for t in telemetry if t.steps]),
    )


class _Tier:
    """One tier's telemetry, summed up."""

    def __init__(self, telemetry: Sequence[Telemetry], number: int, spec: EngineSpec) -> None:
        self.number = number
        self._lines = lines = [t.tiers[number] for t in telemetry]
        self.arrivals = self._sum(lambda line: line.arrivals)
        self.preemptions = self._sum(lambda line: line.preemptions)
        self.prefill_tokens = self._sum(lambda line: line.prefill_tokens)
        self.recomputed_tokens = self._sum(lambda line: line.recomputed_tokens)
        self.queued_tokens = np.array([line.queued_prefill_tokens for line in lines])
        self.busy = (
            sum(line.service_ms for line in lines) * 1e-3 / sum(t.interval_s for t in telemetry)
        )
        means = [_prompt(line) for line in lines if line.arrivals]
        self.longest_tokens = max(means, default=0.0)
        tokens = np.array([mean(means) if means else 1.0, max(self.longest_tokens, 1.0)])
        seen = _idle(tokens)
        alone_ms, pace_ms = ttft_alone_ms(seen, spec), tpot_alone_ms(seen, spec)
        self.alone_ms, self.longest_ms = float(alone_ms[0]), float(alone_ms[1])
        self.pace_ms = float(pace_ms[0])

    def _sum(self, of: Callable[[TierTelemetry], int]) -> int:
        return sum(of(line) for line in self._lines)

    def beyond(self, ttft_ms: float | None, tpot_ms: float | None) -> bool:
        """Whether an idle engine misses the targets with a mean prompt."""
        late = ttft_ms is not None and self.alone_ms > ttft_ms
        return late or (tpot_ms is not None and self.pace_ms > tpot_ms)

    def signs(self, plan: Plan, name: str, cause: Cause, load: float) -> TierSigns:
        """Its signs, with all victims laid at one door."""
        lines, targets = self._lines, plan.tiers[name].targets
        tails_ms = [line.ttft_ms_p99 for line in lines if math.isfinite(line.ttft_ms_p99)]
        judged = self._sum(lambda line: line.attainment_samples)
        met = sum(t.attainment * t.attainment_samples for t in lines if t.attainment_samples)
        missed = 1.0 - met / judged if judged else UNKNOWN
        victims = {c.name.lower(): 0.0 for c in Cause if c is not Cause.NONE}
        if judged and not targets.best_effort:
            victims[cause.name.lower()] = missed
        return TierSigns(
            requests=self.arrivals,
            missed=missed,
            tail=0.0,
            allowed=UNKNOWN if targets.best_effort else 1.0 - targets.attainment,
            victims=victims,
            ttft_p50_ms=mean([line.ttft_ms_p50 for line in lines]),
            ttft_p99_ms=max(tails_ms, default=UNKNOWN),
            alone_p50_ms=self.alone_ms,
            alone_p99_ms=self.longest_ms,
            alone_needed_ms=self.longest_ms,
            alone_tpot_p99_ms=self.pace_ms,
            load=load,
            prompt_p99_tokens=self.longest_tokens,
            preempted=self.preemptions / self.arrivals if self.arrivals else UNKNOWN,
            found=UNKNOWN,
            acceptance=mean([line.acceptance for line in lines]),
            # Metrics tell the longest length allowed, not the one that was chosen.
            draft_tokens=UNKNOWN,
            decode_share=UNKNOWN,
        )


def _prompt(line: TierTelemetry) -> float:
    """Mean uncached prompt of what arrived, tokens; hits are counted when a request starts."""
    tokens = line.arrived_prompt_tokens - line.cached_tokens
    return max(1.0, tokens / line.arrivals)


def _idle(prompt_tokens: FloatArray) -> Observed:
    """Requests of these lengths of which nothing else is known."""
    count = len(prompt_tokens)
    none, zeros = np.full(count, np.nan), np.zeros(count, np.int64)
    return Observed(
        tier=zeros,
        arrival_s=np.zeros(count),
        admitted_s=none,
        first_token_s=none,
        last_token_s=none,
        prompt_tokens=np.round(prompt_tokens).astype(np.int64),
        cached_tokens=zeros,
        repeated_tokens=zeros,
        generated_tokens=zeros,
        preemptions=zeros,
        recomputed_tokens=none,
        outcome=zeros,
        end_s=0.0,
    )


def _above(own: _Tier, tiers: Sequence[_Tier], plan: Plan) -> list[_Tier]:
    """The tier and those of at least its weight."""
    weights = [tier.weight for tier in plan.tiers.values()]
    return [tier for tier in tiers if weights[tier.number] >= weights[own.number]]


def _load(own: _Tier, tiers: Sequence[_Tier], plan: Plan) -> float:
    """Part of the engine's time that the tier and those above it took."""
    return sum(tier.busy for tier in _above(own, tiers, plan))


def _behind(
    own: _Tier, tiers: Sequence[_Tier], plan: Plan, spec: EngineSpec, full: BoolArray
) -> bool:
    """Whether the prompts waiting in the tier and above it often take longer than its target.

    Args:
        own: The tier.
        tiers: All of them.
        plan: The plan.
        spec: The engine.
        full: By interval: whether the engine had no time left, shape (intervals,).
    """
    targets = list(plan.tiers.values())[own.number].targets
    target_ms = min(targets.ttft_ms or math.inf, targets.e2e_ms or math.inf)
    queued = np.sum([tier.queued_tokens for tier in _above(own, tiers, plan)], axis=0)
    late = ttft_alone_ms(_idle(np.maximum(queued, 1).astype(np.float64)), spec) > target_ms
    mostly = _load(own, tiers, plan) >= MOSTLY * sum(tier.busy for tier in tiers)
    return mostly and bool(np.mean(full & late) >= OFTEN)
