"""What a static plan is worth on given traffic: one number to raise.

Weighted attainment alone would give up a tier of little value; so each promise that is missed costs
a part of what it is missed by.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.trace import Trace
from trimtab.training.evaluation.play import Served, play
from trimtab.training.tuning.space import Changes, changed
from trimtab.training.whatif.metrics import tier_facts
from trimtab.training.whatif.run import Contender

PROMISE_WEIGHT = 0.5
"""A mean shortfall of one point over the promised tiers costs this part of a point."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every trial shares."""

    plan: Plan
    """Where the search starts; its targets and values measure every trial."""
    traces: tuple[Trace, ...]
    spec: EngineSpec
    drain_s: float


@dataclass(frozen=True)
class Case:
    """One variation of one trace."""

    trace: int
    seed: int


def play_case(setting: Setting, job: tuple[Changes, Case]) -> Served:
    """Replay one changed plan on one case, without a controller's moves."""
    changes, case = job
    plan = changed(setting.plan, changes) if changes else setting.plan
    return play(
        setting.traces[case.trace],
        Contender(label="trial", policy="static", plan=plan),
        setting.spec,
        by=setting.plan,
        seed=case.seed,
        drain_s=setting.drain_s,
    )


def score(served: Served, plan: Plan) -> float:
    """Weighted attainment less `PROMISE_WEIGHT` x the mean shortfall of the promised tiers.

    Args:
        served: one run.
        plan: whose promises count; best-effort tiers have none, tiers without a request keep it.
    """
    promised = np.array([facts.target for facts in tier_facts(plan)])
    if not np.isfinite(promised).any():
        return served.weighted_attainment
    missed = np.clip(promised - served.tier_attainment, 0.0, None)
    shortfall = float(np.nansum(missed)) / int(np.isfinite(promised).sum())
    return served.weighted_attainment - PROMISE_WEIGHT * shortfall
