"""Observations: telemetry as numbers in [-1, 1], the same in training, what-if and the daemon.

It knows the plan and the telemetry only, and learns nothing: every transform is fixed and written
down in `observation_schema`. It judges nothing; no data is a 0 with a mask beside it.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.errors import AllocationError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.envs import observation_schema as layout
from trimtab.envs.residual import Residual, log_ratio
from trimtab.envs.tier_figures import MOST, TierFigures, counts_of

Observation = npt.NDArray[np.float32]

_LEAST_INTERVAL_S: Final = 1e-6
_blocks_of = attrgetter("kv_blocks_used", "kv_blocks_guaranteed", "kv_blocks_lent")


class Observer:
    """Turns the telemetry of one run, interval after interval, into observations.

    It remembers averages over 10 s and 60 s, so the order counts. Telemetry that it has seen
    already (the same `time_s`) leaves them alone; telemetry from before it is a restart.
    """

    def __init__(self, plan: Plan) -> None:
        """Lay out the observations for a plan."""
        self.schema = layout.observation_schema(plan)
        self._plan = plan
        budget = float(plan.prefill.budget_tokens)
        self._tiers = [TierFigures(tier, budget) for tier in plan.tiers.values()]
        tpots = [tier.targets.tpot_ms for tier in plan.tiers.values()]
        known = [tpot for tpot in tpots if tpot is not None]
        self._tpot_ms = min(known, default=layout.USUAL_TPOT_MS)
        self._batch = float(plan.engine.max_num_seqs or layout.USUAL_BATCH)
        self._first_of_pool = [plan.pool_of_tier.index(p) for p in range(len(plan.pools))]
        self._residual = Residual(plan)
        self.reset()

    def reset(self) -> None:
        """Forget the run."""
        self._time_s = math.nan
        for tier in self._tiers:
            tier.reset()

    def observe(self, telemetry: Telemetry) -> Observation:
        """The observation after one interval, shape (schema.size,), each entry in [-1, 1].

        Raises:
            AllocationError: the telemetry has other tiers than the plan.
        """
        seen = telemetry.tiers
        if len(seen) != len(self._tiers):
            raise AllocationError(
                f"telemetry at {telemetry.time_s:g} s",
                key="tiers",
                value=len(seen),
                bound=f"{len(self._tiers)}, as in the plan",
            )
        told_s = telemetry.interval_s
        told = _LEAST_INTERVAL_S <= told_s < math.inf
        interval_s = told_s if told else self._plan.controller.interval_s
        elapsed_s = self._elapsed_s(telemetry.time_s, interval_s)
        figures: list[float] = []
        for tier, of in zip(self._tiers, seen, strict=True):
            figures += tier.observe(of, interval_s, elapsed_s)
        figures += self._pools(telemetry)
        figures += self._engine(telemetry)
        figures += self._residual.of(telemetry.applied)
        return np.clip(np.array(figures), -1.0, 1.0).astype(np.float32)

    def _elapsed_s(self, time_s: float, interval_s: float) -> float:
        """Time since the telemetry seen before, 0 if this is it again."""
        if time_s < self._time_s:
            self.reset()
        elapsed_s = time_s - self._time_s
        self._time_s = time_s
        return elapsed_s if 0 <= elapsed_s < math.inf else interval_s

    def _pools(self, telemetry: Telemetry) -> list[float]:
        shares: list[float] = []
        total = 0.0
        for first in self._first_of_pool:
            blocks = [_count(value) for value in _blocks_of(telemetry.tiers[first])]
            total += blocks[1]
            shares += blocks
        total = max(total, 1.0)
        return [blocks / total for blocks in shares]

    def _engine(self, telemetry: Telemetry) -> list[float]:
        counts = [count for tier in telemetry.tiers for count in counts_of(tier)]
        step_ms, age_s = telemetry.step_ms_mean, telemetry.age_s
        stepped = step_ms > 0
        return [
            _or_zero(telemetry.kv_use_fraction),
            _or_zero(telemetry.batch_mean) / self._batch,
            _or_zero(telemetry.busy_fraction),
            # An age that is not known is as bad as one beyond the lease.
            age_s / self._plan.controller.lease_s if math.isfinite(age_s) else 1.0,
            sum([count == count for count in counts]) / len(counts),
            log_ratio(step_ms / self._tpot_ms, layout.LATENCY_FACTOR) if stepped else 0.0,
            float(stepped),
        ]


def _count(value: float) -> float:
    return value if 0.0 <= value <= MOST else 0.0


def _or_zero(figure: float) -> float:
    return figure if math.isfinite(figure) else 0.0
