"""The figures of one run: counts, attainment, quantiles, goodput, cost and fairness by tier.

It reads a finished replay; it compares nothing (see `compare`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge import pricing
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.envs import score
from trimtab.training.whatif.schema import (
    EngineMetrics,
    Fairness,
    Quantiles,
    TierDrafts,
    TierFacts,
    TierMetrics,
)

if TYPE_CHECKING:
    from trimtab.engine_bridge.replay.report import ReplayResult

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What every run of one seed is measured with: the traffic and the reference plan."""

    trace: Trace
    plan: Plan
    tier: IntArray
    """Index of each request's tier in the plan, shape (n,)."""
    demand: FloatArray
    """Value asked for by each request, shape (n,)."""
    targets: score.Targets
    values: FloatArray
    """Value by the plan's tiers, shape (tiers,)."""

    @property
    def window_s(self) -> float:
        """What rates are taken over: the time in which the trace arrived, seconds."""
        return max(self.trace.duration_s, 1e-9)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A run's requests against the targets."""

    seen: score.Latencies
    met: score.Met


def yardstick(trace: Trace, plan: Plan) -> Yardstick:
    """The measure for this traffic under this plan.

    Raises:
        PlanError: the trace has a tier that the plan lacks.
    """
    place = np.array([plan.tier_index(name) for name in trace.tier_names], np.int64)
    values = np.array([tier.value for tier in plan.tiers.values()])
    return Yardstick(
        trace=trace,
        plan=plan,
        tier=place[trace.tier],
        demand=score.demand(trace, values[place]),
        targets=score.targets(plan),
        values=values,
    )


def tier_facts(plan: Plan) -> tuple[TierFacts, ...]:
    """What the plan promises, by tier."""

    def known(target: float | None) -> float:
        return float("nan") if target is None else target

    return tuple(
        TierFacts(
            name=name,
            value=tier.value,
            target=float("nan") if tier.targets.best_effort else tier.targets.attainment,
            ttft_ms=known(tier.targets.ttft_ms),
            tpot_ms=known(tier.targets.tpot_ms),
            e2e_ms=known(tier.targets.e2e_ms),
        )
        for name, tier in plan.tiers.items()
    )


def judge(result: ReplayResult, by: Yardstick) -> Judged:
    """Which requests of the run kept which target."""
    rows = result.requests
    seen = score.latencies(
        arrival_s=np.asarray(rows["arrival_s"], np.float64),
        first_token_s=np.asarray(rows["first_token_s"], np.float64),
        last_token_s=np.asarray(rows["last_token_s"], np.float64),
        generated_tokens=np.asarray(rows["generated_tokens"], np.int64),
    )
    outcome = np.asarray(rows["outcome"], np.int64)
    met = score.judge(tier=by.tier, outcome=outcome, seen=seen, to=by.targets)
    return Judged(seen=seen, met=met)


def measure_tiers(
    result: ReplayResult, judged: Judged, by: Yardstick, spec: EngineSpec
) -> dict[str, TierMetrics]:
    """The figures of every tier of the plan, also of those without a request."""
    service_ms = np.nan_to_num(result.requests["service_ms"])
    total_ms = float(service_ms.sum())
    price = by.plan.engine.cost_per_hour
    cost_usd = (spec.cost_per_hour if price is None else price) * by.window_s / 3600
    tiers = {}
    for index, name in enumerate(by.plan.tiers):
        rows = by.tier == index
        share = float(service_ms[rows].sum()) / total_ms if total_ms > 0 else 0.0
        tiers[name] = _tier(result, judged, by, index, share, cost_usd)
    return tiers


def measure_engine(
    result: ReplayResult, tiers: Mapping[str, TierMetrics], judged: Judged, by: Yardstick
) -> EngineMetrics:
    """The figures of the engine as a whole."""
    arriving = [t for t in result.telemetry if t.time_s - t.interval_s < by.window_s]
    seconds = sum(t.interval_s for t in arriving)
    decoded = sum(sum(tier.decode_tokens for tier in t.tiers) for t in arriving)
    busy_s = sum(t.busy_fraction * t.interval_s for t in arriving)
    goodput = np.array([tier.goodput_tokens_per_s for tier in tiers.values()])
    return EngineMetrics(
        tokens_per_s=decoded / seconds if seconds else 0.0,
        utilization=busy_s / seconds if seconds else 0.0,
        weighted_goodput=float(goodput @ by.values),
        weighted_attainment=score.weighted_attainment(by.demand, judged.met.every),
        steps=int(result.steps),
        end_s=float(result.end_s),
        digest=result.digest(),
    )


def measure_fairness(result: ReplayResult, by: Yardstick, *, fair_rules: bool) -> Fairness:
    """How evenly tenants were served inside their tiers, and tiers against each other.

    A tenant's served part is priced as its demand is: prompts whose first token came, and the
    output tokens that came, over what it asked for. The gap between tiers is kept by the fair
    rules only; under stock rules it is unknown.
    """
    trace, rows = by.trace, result.requests
    prompt = pricing.priced_prompt_tokens(trace)
    asked = pricing.priced_tokens(trace)
    given = np.where(np.isfinite(rows["first_token_s"]), prompt, 0.0)
    given = given + pricing.OUTPUT_PRICE * np.minimum(rows["generated_tokens"], trace.output_tokens)
    jain = {}
    for index, name in enumerate(by.plan.tiers):
        mine = by.tier == index
        tenants = len(trace.tenant_names)
        wanted = np.bincount(trace.tenant[mine], weights=asked[mine], minlength=tenants)
        got = np.bincount(trace.tenant[mine], weights=given[mine], minlength=tenants)
        jain[name] = score.jain_index(got[wanted > 0] / wanted[wanted > 0])
    return Fairness(
        jain=jain,
        service_gap_ms=float(result.service_gap_ms) if fair_rules else float("nan"),
        service_gap_bound_ms=float(result.service_gap_bound_ms) if fair_rules else float("nan"),
    )


def measure_drafts(result: ReplayResult, plan: Plan) -> dict[str, TierDrafts] | None:
    """What each tier of the plan that ran verified; None for an engine without a draft model."""
    if not result.drafts:
        return None
    return {
        name: TierDrafts(
            draft_tokens=counts.drafts,
            acceptance=_ratio(counts.accepted, counts.drafts),
            mean_draft_tokens=_ratio(counts.drafts, counts.steps),
            tokens_per_step=_ratio(counts.steps + counts.accepted, counts.steps),
        )
        for name, counts in zip(plan.tiers, result.drafts, strict=True)
    }


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _tier(
    result: ReplayResult,
    judged: Judged,
    by: Yardstick,
    index: int,
    service_share: float,
    cost_usd: float,
) -> TierMetrics:
    rows = by.tier == index
    columns = result.requests
    outcome = columns["outcome"][rows]
    finished = int(np.sum(outcome == score.FINISHED))
    telemetry = [t.tiers[index] for t in result.telemetry]
    met, to = judged.met, by.targets
    admitted = rows & np.isfinite(columns["admitted_s"])

    def total(column: str) -> int:
        return int(np.nansum(columns[column][rows]))

    return TierMetrics(
        requests=int(rows.sum()),
        finished=finished,
        refused=int(np.sum((outcome == score.REFUSED) | (outcome == score.SHED))),
        unfinished=int(np.sum(outcome == score.UNFINISHED)),
        cancelled=int(np.sum(outcome == score.CANCELLED)),
        attainment=_share(met.every[rows]),
        attainment_ttft=_share(met.ttft[rows], promised=to.ttft_ms[index]),
        attainment_tpot=_share(met.tpot[rows], promised=to.tpot_ms[index]),
        attainment_e2e=_share(met.e2e[rows], promised=to.e2e_ms[index]),
        ttft_ms=_quantiles(judged.seen.ttft_ms[rows]),
        tpot_ms=_quantiles(judged.seen.tpot_ms[rows]),
        e2e_ms=_quantiles(judged.seen.e2e_ms[rows & (columns["outcome"] == score.FINISHED)]),
        goodput_tokens_per_s=float(columns["output_tokens"][rows & met.every].sum()) / by.window_s,
        preemptions=total("preemptions"),
        recomputed_tokens=total("recomputed_tokens"),
        prompt_tokens=int(by.trace.prompt_tokens[admitted].sum()),
        cached_tokens=total("cached_tokens"),
        kv_blocks_held=_mean([t.kv_blocks_used for t in telemetry]),
        kv_blocks_lent=_mean([t.kv_blocks_lent for t in telemetry]),
        service_share=service_share,
        cost_per_1k_calls=1000 * cost_usd * service_share / finished if finished else float("nan"),
    )


def _share(met: BoolArray, *, promised: float = 0.0) -> float:
    return float(met.mean()) if len(met) and np.isfinite(promised) else float("nan")


def _mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else float("nan")


def _quantiles(values: FloatArray) -> Quantiles:
    known = values[np.isfinite(values)]
    if not len(known):
        return Quantiles(p50=float("nan"), p90=float("nan"), p99=float("nan"))
    p50, p90, p99 = np.quantile(known, [0.5, 0.9, 0.99])
    return Quantiles(p50=float(p50), p90=float(p90), p99=float(p99))
