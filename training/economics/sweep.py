"""Replays a plan with more and less reserved for a tier, and counts what each point served.

It judges nothing (see `frontier`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.economics.frontier import (
    Counts,
    FloatArray,
    Frontier,
    Setting,
    find_frontier,
)
from trimtab.training.economics.reserve import reserve_of, with_reserve, within_bounds
from trimtab.training.economics.statement import Economics
from trimtab.training.economics.study import ReserveStudy
from trimtab.training.evaluation.pool import Pool
from trimtab.training.whatif import compare, metrics
from trimtab.training.whatif.run import (
    ENGINE_LIMITS,
    Contender,
    Study,
    drive,
    run_one,
    trace_facts,
)
from trimtab.training.whatif.statistics import BINS
from trimtab.training.whatif.variation import vary

_WARM_UP_REQUESTS = 2


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to run."""

    trace: Trace
    plan: Plan
    spec: EngineSpec
    tier: str
    moves: tuple[tuple[str, ...], ...]
    """Each is one frontier: the knobs (`reserve.KNOBS`) that move together."""
    reserves: tuple[float, ...]
    """Parts of the whole, from 0 to 1."""
    seeds: tuple[int, ...]
    drain_s: float


@dataclass(frozen=True)
class _Served:
    """One plan, one seed: rows of `Counts`, and the money."""

    asked: FloatArray
    attained: FloatArray
    good_tokens: FloatArray
    others_good_tokens: FloatArray
    weighted_good_tokens: FloatArray
    tier_attainment: FloatArray
    economics: Economics


@dataclass(frozen=True)
class _Shared:
    study: Study
    tier: int


def runs_of(sweep: Sweep) -> int:
    """How many replays it takes."""
    return (1 + len(sweep.moves) * len(sweep.reserves)) * len(sweep.seeds)


def run_sweep(
    sweep: Sweep, *, processes: int | None = None, on_done: Callable[[], None] = lambda: None
) -> ReserveStudy:
    """Run all points on all seeds; one frontier for each of the moves, each with the plan's point.

    Raises:
        PlanError: the plan has nobody to share a knob with, or lacks a tier of the trace.
        TrimtabError: a run failed.
    """
    plans = [sweep.plan]
    for knobs in sweep.moves:
        plans += [with_reserve(sweep.plan, sweep.tier, part, knobs) for part in sweep.reserves]
    study = _study(sweep, plans)
    by_plan = _serve_all(sweep, study, processes, on_done)
    frontiers: list[Frontier] = []
    for place, knobs in enumerate(sweep.moves):
        first = 1 + place * len(sweep.reserves)
        settings = [_setting(sweep, sweep.plan, by_plan[0], knobs, None)]
        for i, reserve in enumerate(sweep.reserves, start=first):
            settings.append(_setting(sweep, plans[i], by_plan[i], knobs, reserve))
        usd_per_hour = by_plan[0][0].economics.usd_per_hour
        frontiers.append(
            find_frontier(settings, tier=sweep.tier, knobs=knobs, usd_per_hour=usd_per_hour)
        )
    return ReserveStudy(
        tier=sweep.tier,
        engine=sweep.spec.name,
        engine_limits={name: getattr(sweep.spec, name) for name in ENGINE_LIMITS},
        plan=sweep.plan.name,
        trace=trace_facts(study),
        seeds=sweep.seeds,
        frontiers=tuple(frontiers),
    )


def _study(sweep: Sweep, plans: Sequence[Plan]) -> Study:
    return Study(
        trace=sweep.trace,
        plan=sweep.plan,
        contenders=tuple(
            Contender(label=str(i), policy="static", plan=plan) for i, plan in enumerate(plans)
        ),
        spec=sweep.spec,
        seeds=sweep.seeds,
        drain_s=sweep.drain_s,
    )


def _serve_all(
    sweep: Sweep, study: Study, processes: int | None, on_done: Callable[[], None]
) -> list[list[_Served]]:
    """What each plan served, by seed."""
    if processes != 1:
        # Compiled once here: forked workers inherit it, spawned ones find it in the cache.
        few = sweep.trace.head(_WARM_UP_REQUESTS)
        drive(few, make_policy("static"), sweep.plan, sweep.spec, seed=0, drain_s=1.0)
    jobs = [(i, seed) for i in range(len(study.contenders)) for seed in sweep.seeds]
    served: list[_Served] = []
    with Pool(_Shared(study, sweep.plan.tier_index(sweep.tier)), processes=processes) as pool:
        for one in pool.map(_serve, jobs):
            served.append(one)
            on_done()
    seeds = len(sweep.seeds)
    return [served[i * seeds : (i + 1) * seeds] for i in range(len(study.contenders))]


def _serve(shared: _Shared, job: tuple[int, int]) -> _Served:
    study, (contender, seed) = shared.study, job
    run = run_one(study, study.contenders[contender], seed)
    by = metrics.yardstick(vary(study.trace, seed), study.plan)
    bins = compare.paired(by).bins
    met = run.judged.met.every
    mine = by.tier == shared.tier

    def by_bin(weights: FloatArray) -> FloatArray:
        return np.bincount(bins, weights=weights, minlength=BINS).astype(np.float64)

    good = np.where(met, by.trace.output_tokens, 0).astype(np.float64)
    return _Served(
        asked=by_bin(mine.astype(np.float64)),
        attained=by_bin((mine & met).astype(np.float64)),
        good_tokens=by_bin(good),
        others_good_tokens=by_bin(np.where(mine, 0.0, good)),
        weighted_good_tokens=by_bin(good * by.values[by.tier]),
        tier_attainment=np.array([m.attainment for m in run.result.tiers.values()]),
        economics=run.result.economics,
    )


def _setting(
    sweep: Sweep,
    plan: Plan,
    served: Sequence[_Served],
    knobs: Sequence[str],
    reserve: float | None,
) -> Setting:
    """One point; without a reserve it is the static plan's, at its own of the first knob."""

    def rows(name: str) -> FloatArray:
        return np.stack([getattr(one, name) for one in served])

    attained = rows("tier_attainment")
    money = [one.economics for one in served]
    pays = [one.tiers[sweep.tier].cost_usd / one.window_s * 3600 for one in money]
    return Setting(
        reserve=reserve_of(sweep.plan, sweep.tier, knobs[0]) if reserve is None else reserve,
        is_plan=reserve is None,
        within_bounds=within_bounds(sweep.plan, plan, sweep.tier, knobs),
        counts=Counts(
            asked=rows("asked"),
            attained=rows("attained"),
            good_tokens=rows("good_tokens"),
            others_good_tokens=rows("others_good_tokens"),
            weighted_good_tokens=rows("weighted_good_tokens"),
            seconds=max(sweep.trace.duration_s, 1e-9) / BINS,
        ),
        tier_attainment=dict(zip(sweep.plan.tiers, attained.mean(axis=0).tolist(), strict=True)),
        usd_per_1m_good_tokens=float(np.mean([m.engine.usd_per_1m_good_tokens for m in money])),
        tier_usd_per_hour=float(np.mean(pays)),
    )
