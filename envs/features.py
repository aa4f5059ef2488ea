"""What a policy reads out of telemetry: how far each tier is from its promises.

Pure functions of one interval. "No data" stays NaN here; it is for the reader to hold still on it,
and never becomes a zero that looks like a tier doing fine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry

FloatArray = npt.NDArray[np.float64]

HALF_TRUST_SAMPLES: Final = 4.0
"""So many samples move an attainment halfway from no error to the measured one."""


@dataclass(frozen=True, kw_only=True)
class SloErrors:
    """Distance from the targets by tier, shape (tiers,); positive = worse, NaN = no data."""

    attainment: FloatArray
    """(target - measured attainment) x samples / (samples + 4), in [-1, 1]: few samples, little
    trust. NaN too for a best-effort tier, whose misses break no promise."""
    ttft: FloatArray
    """ln(P99 TTFT / target); NaN too where the tier has no TTFT target."""
    tpot: FloatArray
    """ln(P99 TPOT / target); NaN too where the tier has no TPOT target."""

    @property
    def known(self) -> bool:
        """Whether any tier has data."""
        return bool(np.isfinite(np.concatenate([self.attainment, self.ttft, self.tpot])).any())


def slo_errors(telemetry: Telemetry, plan: Plan) -> SloErrors:
    """The errors of one interval's telemetry against the plan's targets."""
    tiers = list(zip(plan.tiers.values(), telemetry.tiers, strict=True))
    return SloErrors(
        attainment=np.array(
            [
                np.nan
                if tier.targets.best_effort
                else attainment_gap(
                    tier.targets.attainment, seen.attainment, seen.attainment_samples
                )
                for tier, seen in tiers
            ]
        ),
        ttft=np.array([_log_ratio(seen.ttft_ms_p99, tier.targets.ttft_ms) for tier, seen in tiers]),
        tpot=np.array([_log_ratio(seen.tpot_ms_p99, tier.targets.tpot_ms) for tier, seen in tiers]),
    )


def attainment_gap(target: float, measured: float, samples: float) -> float:
    """(target - measured) x samples / (samples + 4), in [-1, 1]; NaN without data."""
    if not math.isfinite(measured) or not math.isfinite(samples) or samples <= 0:
        return math.nan
    trust = samples / (samples + HALF_TRUST_SAMPLES)
    return min(max((target - measured) * trust, -1.0), 1.0)


def _log_ratio(measured_ms: float, target_ms: float | None) -> float:
    if target_ms is None or not np.isfinite(measured_ms) or measured_ms <= 0:
        return float("nan")
    return float(np.log(measured_ms) - np.log(target_ms))
