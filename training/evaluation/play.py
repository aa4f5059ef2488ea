"""One contender on one variation of one trace: what it served, by time bin.

It compares nothing (see `paired`) and takes no quantiles (see `trimtab.training.whatif.metrics`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.agents.guard import Guard
from trimtab.agents.policy import Policy
from trimtab.agents.registry import make_policy
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.report import ReplayResult
from trimtab.engine_bridge.trace import Trace
from trimtab.training.whatif import compare, metrics
from trimtab.training.whatif.run import Contender, drive
from trimtab.training.whatif.statistics import BINS
from trimtab.training.whatif.variation import vary

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Served:
    """What one run was asked for and what it served within targets, by time bin."""

    demand: FloatArray
    """Value asked for, shape (BINS,); the same for every contender."""
    met_demand: FloatArray
    """Value served within targets, shape (BINS,)."""
    met_tokens: FloatArray
    """Output tokens of requests within targets times their tier's value, shape (BINS,)."""
    requests: FloatArray
    """Requests by tier, shape (tiers, BINS); the same for every contender."""
    met_requests: FloatArray
    """Requests within targets by tier, shape (tiers, BINS)."""
    fallback_fraction: float
    """Share of the control intervals in which a guard held the policy off; NaN without a guard."""

    @property
    def weighted_attainment(self) -> float:
        """The headline figure, in [0, 1]; NaN without demand."""
        total = float(self.demand.sum())
        return float(self.met_demand.sum()) / total if total else float("nan")

    @property
    def tier_attainment(self) -> FloatArray:
        """Share of each tier's requests within targets, shape (tiers,); NaN without any."""
        asked = self.requests.sum(axis=1)
        return np.where(asked > 0, self.met_requests.sum(axis=1) / np.maximum(asked, 1), np.nan)


def play(
    trace: Trace,
    contender: Contender,
    spec: EngineSpec,
    *,
    by: Plan,
    seed: int,
    drain_s: float,
    speed: float = 1.0,
) -> Served:
    """Replay one contender on one variation of the trace.

    Args:
        trace: the traffic as recorded.
        contender: the policy and the plan that it runs under.
        spec: the engine as its step-time model knows it.
        by: the plan whose targets and values measure every contender.
        seed: variation of the traffic (`trimtab.training.whatif.variation`), 0 as recorded.
        drain_s: how long after the last arrival the run may go on, seconds.
        speed: true step time over the model's; above 1 the engine has become slower.
    """
    varied = vary(trace, seed)
    policy = make_policy(contender.policy)
    result = drive(varied, policy, contender.plan, spec, seed=seed, drain_s=drain_s, speed=speed)
    return _serve(result, metrics.yardstick(varied, by), fallback_fraction(policy))


def fallback_fraction(policy: Policy) -> float:
    """Share of the intervals in which the policy's guard fell back; NaN where it has no guard."""
    if not isinstance(policy, Guard) or not policy.tally.intervals:
        return float("nan")
    return policy.tally.fell_back / policy.tally.intervals


def _serve(result: ReplayResult, by: metrics.Yardstick, fallback: float) -> Served:
    met = metrics.judge(result, by).met.every
    bins = compare.paired(by).bins
    tiers = len(by.plan.tiers)
    cell = by.tier * BINS + bins

    def total(weights: FloatArray) -> FloatArray:
        return np.bincount(bins, weights=weights, minlength=BINS).astype(np.float64)

    def count(weights: npt.NDArray[np.generic]) -> FloatArray:
        flat = np.bincount(cell, weights=weights, minlength=tiers * BINS)
        return flat.astype(np.float64).reshape(tiers, BINS)

    return Served(
        demand=total(by.demand),
        met_demand=total(by.demand * met),
        met_tokens=total(by.values[by.tier] * by.trace.output_tokens * met),
        requests=count(np.ones(len(met))),
        met_requests=count(met),
        fallback_fraction=fallback,
    )
