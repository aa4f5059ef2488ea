"""The figures of a fleet's run: by tier, by engine, and of the whole. It compares nothing."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.envs import score
from trimtab.training.fleet.run import LOST, FleetRun
from trimtab.training.whatif.metrics import Yardstick
from trimtab.training.whatif.schema import Quantiles, jsonable

SCHEMA: Final = 1


@dataclass(frozen=True, kw_only=True)
class FleetTier:
    """One tier in one run; as in a what-if."""

    requests: int
    finished: int
    refused: int
    """Refused, shed, or given up on while no engine could be used."""
    lost: int
    """Being answered when their engine ended."""
    unfinished: int
    attainment: float
    ttft_ms: Quantiles
    tpot_ms: Quantiles
    goodput_tokens_per_s: float
    cached_fraction: float
    """Prompt tokens that a cache or the store saved, of those admitted; NaN without any."""


@dataclass(frozen=True, kw_only=True)
class FleetEngine:
    """One engine in one run."""

    requests: int
    """Served by it last."""
    utilization: float
    """Busy part of the time in which it was paid for; NaN if it never was."""
    cost_usd: float


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """One fleet under one policy with one seed."""

    fleet: str
    policy: str
    plan: str
    seed: int
    tiers: dict[str, FleetTier]
    engines: dict[str, FleetEngine]
    weighted_attainment: float
    goodput_tokens_per_s: float
    """Output tokens of requests within their targets, over the trace's duration."""
    cost_usd: float
    """Of all engines, from the beginning to the last request's end."""
    cost_per_1m_good_tokens: float
    """USD for a million output tokens within their targets; NaN without any."""
    retried: int
    loaded_tokens: int
    end_s: float


def measure(
    run: FleetRun,
    by: Yardstick,
    specs: Mapping[str, EngineSpec],
    *,
    fleet: str,
    policy: str,
    seed: int,
) -> FleetResult:
    """Take the figures of a run.

    Args:
        run: The run.
        by: The traffic and the plan that it is measured by.
        specs: By engine.
        fleet: Name of the fleet.
        policy: Name of the policy.
        seed: Of the run.
    """
    rows = run.requests
    seen = score.latencies(
        arrival_s=np.asarray(rows["arrival_s"], np.float64),
        first_token_s=np.asarray(rows["first_token_s"], np.float64),
        last_token_s=np.asarray(rows["last_token_s"], np.float64),
        generated_tokens=np.asarray(rows["generated_tokens"], np.int64),
    )
    outcome = np.asarray(rows["outcome"], np.int64)
    # For a client a lost answer is one that never ended.
    judged = np.where(outcome == LOST, score.UNFINISHED, outcome)
    met = score.judge(tier=by.tier, outcome=judged, seen=seen, to=by.targets)
    # A plan's own price is for its engine: where a fleet has others, too, it says nothing of them.
    price = by.plan.engine.cost_per_hour if len({s.name for s in specs.values()}) == 1 else None
    costs = {
        name: (specs[name].cost_per_hour if price is None else price) * run.up_s[name] / 3600.0
        for name in run.engines
    }
    good = float(np.asarray(rows["output_tokens"], np.float64)[met.every].sum())
    total = sum(costs.values())
    return FleetResult(
        fleet=fleet,
        policy=policy,
        plan=by.plan.name,
        seed=seed,
        tiers={
            name: _tier(run, by, number, outcome, seen, met.every)
            for number, name in enumerate(by.plan.tier_names)
        },
        engines={
            name: FleetEngine(
                requests=int(np.sum(rows["engine"] == number)),
                utilization=run.busy_s[name] / run.up_s[name] if run.up_s[name] else math.nan,
                cost_usd=costs[name],
            )
            for number, name in enumerate(run.engines)
        },
        weighted_attainment=score.weighted_attainment(by.demand, met.every),
        goodput_tokens_per_s=good / by.window_s,
        cost_usd=total,
        cost_per_1m_good_tokens=1e6 * total / good if good else math.nan,
        retried=run.retried,
        loaded_tokens=run.loaded_tokens,
        end_s=run.end_s,
    )


def _tier(
    run: FleetRun,
    by: Yardstick,
    number: int,
    outcome: npt.NDArray[np.int64],
    seen: score.Latencies,
    met: npt.NDArray[np.bool_],
) -> FleetTier:
    mine = by.tier == number
    rows = run.requests
    admitted = mine & np.isfinite(np.asarray(rows["admitted_s"], np.float64))
    prompts = float(np.asarray(rows["prompt_tokens"], np.float64)[admitted].sum())
    cached = float(np.asarray(rows["cached_tokens"], np.float64)[admitted].sum())
    ended = outcome[mine]
    tokens = np.asarray(rows["output_tokens"], np.float64)[mine & met]
    return FleetTier(
        requests=int(mine.sum()),
        finished=int(np.sum(ended == score.FINISHED)),
        refused=int(np.sum((ended == score.REFUSED) | (ended == score.SHED))),
        lost=int(np.sum(ended == LOST)),
        unfinished=int(np.sum(ended == score.UNFINISHED)),
        attainment=float(met[mine].mean()) if mine.any() else math.nan,
        ttft_ms=_quantiles(seen.ttft_ms[mine]),
        tpot_ms=_quantiles(seen.tpot_ms[mine]),
        goodput_tokens_per_s=float(tokens.sum()) / by.window_s,
        cached_fraction=cached / prompts if prompts else math.nan,
    )


def _quantiles(values: npt.NDArray[np.float64]) -> Quantiles:
    known = values[np.isfinite(values)]
    if not len(known):
        return Quantiles(p50=math.nan, p90=math.nan, p99=math.nan)
    p50, p90, p99 = np.quantile(known, [0.5, 0.9, 0.99])
    return Quantiles(p50=float(p50), p90=float(p90), p99=float(p99))


def to_json(results: tuple[FleetResult, ...], facts: Mapping[str, Any]) -> str:
    """All runs for machines, the same bytes for the same runs."""
    content = {
        "schema": SCHEMA,
        **facts,
        "results": [dataclasses.asdict(result) for result in results],
    }
    return json.dumps(jsonable(content), indent=1, allow_nan=False)
