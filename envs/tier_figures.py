"""One tier's part of an observation, and the averages that it remembers.

`observation_schema` says what each figure is; their order here is that of its tables.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Final

from trimtab.engine_bridge.plan import Tier
from trimtab.engine_bridge.telemetry import TierTelemetry
from trimtab.envs import observation_schema as layout
from trimtab.envs.features import attainment_gap
from trimtab.envs.residual import log_ratio

MOST: Final = 1e12
"""Stands for infinity: beyond every unit's `most`, and no product of two overflows."""
_LEAST: Final = 1e-300

counts_of = attrgetter(
    "arrivals",
    "arrived_prompt_tokens",
    "decode_tokens",
    "preemptions",
    "recomputed_tokens",
    "refused",
    "queue_length",
    "queued_prefill_tokens",
    "oldest_wait_s",
    "running",
)
"""The counts and levels of a tier that an observation tells of."""
_LOGS: Final = tuple(log for log, _ in layout.TIER_LOGS.values())
_SCALES: Final = tuple((1.0 / log.unit, 1.0 / math.log1p(log.most / log.unit)) for log in _LOGS)
_REQUEST_UNIT: Final = layout.TIER_LOGS["arrivals_10s"][0].unit
_PROMPT_UNIT: Final = layout.TIER_LOGS["prompt_10s"][0].unit


class _Average:
    """Exponential averages over 10 s and 60 s of what has been seen, however little."""

    def __init__(self) -> None:
        self.fast = self.slow = 0.0
        self._fast_weight = self._slow_weight = 0.0

    def add(self, value: float, fast_keep: float, slow_keep: float) -> None:
        """Forget the given parts, take a value in."""
        self._fast_weight = fast_keep * self._fast_weight + (1.0 - fast_keep)
        self._slow_weight = slow_keep * self._slow_weight + (1.0 - slow_keep)
        self.fast += (value - self.fast) * (1.0 - fast_keep) / max(self._fast_weight, _LEAST)
        self.slow += (value - self.slow) * (1.0 - slow_keep) / max(self._slow_weight, _LEAST)

    def trend(self, unit: float) -> float:
        return log_ratio((self.fast + unit) / (self.slow + unit), layout.TREND_FACTOR)


class TierFigures:
    """Turns one tier's telemetry, interval after interval, into its figures."""

    def __init__(self, tier: Tier, budget_tokens: float) -> None:
        """Take the references from the plan's tier and its static prefill budget."""
        targets = tier.targets
        wait_ms = targets.ttft_ms or targets.e2e_ms or layout.USUAL_TARGET_MS
        self._wait_s = wait_ms / 1e3
        self._target = targets.attainment
        self._ttft_ms, self._tpot_ms = targets.ttft_ms, targets.tpot_ms
        self._budget = budget_tokens
        self.reset()

    def reset(self) -> None:
        """Forget the run."""
        self._requests, self._prompts = _Average(), _Average()
        self._met = self._judged = 0.0

    def observe(self, seen: TierTelemetry, interval_s: float, elapsed_s: float) -> list[float]:
        """The figures of one interval, not yet clipped.

        Args:
            seen: The tier's telemetry.
            interval_s: What its counts are of.
            elapsed_s: How far the averages move on; 0 for telemetry seen before.
        """
        counts = [x if 0.0 <= x <= MOST else _mended(x) for x in counts_of(seen)]
        per_s, per_budget = 1.0 / interval_s, 1.0 / self._budget
        if elapsed_s > 0:
            self._remember(seen, counts[0] * per_s, counts[1] * per_s * per_budget, elapsed_s)
        requests, prompts = self._requests, self._prompts
        values = (
            requests.fast,
            requests.slow,
            prompts.fast,
            prompts.slow,
            counts[2] * per_s,
            counts[3] * per_s,
            counts[4] * per_s * per_budget,
            counts[5] * per_s,
            counts[6],
            counts[7] * per_budget,
            counts[8] / self._wait_s,
            counts[9],
        )
        figures = [
            math.log1p(value * scale) * norm
            for value, (scale, norm) in zip(values, _SCALES, strict=True)
        ]
        figures += (requests.trend(_REQUEST_UNIT), prompts.trend(_PROMPT_UNIT))
        return figures + self._quality(seen)

    def _remember(
        self, seen: TierTelemetry, requests_per_s: float, prompts_per_s: float, elapsed_s: float
    ) -> None:
        fast_keep = math.exp(-elapsed_s / layout.FAST_S)
        slow_keep = math.exp(-elapsed_s / layout.SLOW_S)
        if seen.arrivals == seen.arrivals:
            self._requests.add(requests_per_s, fast_keep, slow_keep)
        if seen.arrived_prompt_tokens == seen.arrived_prompt_tokens:
            self._prompts.add(prompts_per_s, fast_keep, slow_keep)
        self._met *= slow_keep
        self._judged *= slow_keep
        if seen.has_attainment:
            samples = min(float(seen.attainment_samples), MOST)
            self._met += min(max(seen.attainment, 0.0), 1.0) * samples
            self._judged += samples

    def _quality(self, seen: TierTelemetry) -> list[float]:
        gap = attainment_gap(self._target, seen.attainment, seen.attainment_samples)
        remembered = self._judged >= layout.LEAST_SAMPLES
        gap_60s = 0.0
        if remembered:
            gap_60s = attainment_gap(self._target, self._met / self._judged, self._judged)
        ttft = _late(seen.ttft_ms_p99, self._ttft_ms)
        tpot = _late(seen.tpot_ms_p99, self._tpot_ms)
        known = gap == gap
        accepted = seen.acceptance == seen.acceptance
        return [
            gap if known else 0.0,
            gap_60s,
            0.0 if ttft is None else ttft,
            0.0 if tpot is None else tpot,
            seen.acceptance if accepted else 0.0,
            float(known),
            float(remembered),
            float(ttft is not None),
            float(tpot is not None),
            float(accepted),
        ]


def _late(measured_ms: float, target_ms: float | None) -> float | None:
    if target_ms is None or not measured_ms > 0:
        return None
    return log_ratio(measured_ms / target_ms, layout.LATENCY_FACTOR)


def _mended(count: float) -> float:
    """What stands for a count that is no number, below 0 or beyond `MOST`."""
    return MOST if count > MOST else 0.0
