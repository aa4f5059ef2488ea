"""The settings of the guard: what it tolerates, how far a policy may go, how it comes back.

`GuardSettings.budget` computes what a guarded policy may cost; docs/guard.md derives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

DEFAULT_REACH: Final[Mapping[str, float]] = MappingProxyType(
    {
        "weights": 1.5,
        "kv_fractions": 1.0,
        "prefill_budget_tokens": 0.4,
        "prefill_shares": 1.5,
        "slack_fraction": 0.3,
        "low_tier_chunk_share": 0.4,
        "shed_at": 0.3,
    }
)
"""Logarithms of factors, for `slack_fraction` a difference. The prefill budget and the low tiers'
share are close: their product is what the low tiers get of a step, and what they lose by it shows
only minutes later."""


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """How the guard judges; durations are of the telemetry's clock."""

    reach: Mapping[str, float] = field(default_factory=lambda: DEFAULT_REACH)
    """How far from static each knob may go: the logarithm of a factor, for `slack_fraction` a
    difference. A knob without an entry stays static. 0: no policy moves anything; above 2: a
    policy can cost more than the budget before anything shows."""
    hold_after_intervals: float = 2.0
    """Telemetry older than this keeps the last allocation, control intervals. 0: every late scrape
    holds; large: the policy acts on the past."""
    static_after_intervals: float = 5.0
    """Telemetry older than this falls back, control intervals. At `hold_after_intervals` it never
    only holds; large: an old allocation is kept for as long, as asking for it renews the lease."""
    probation_s: float = 60.0
    """Time under the static plan before a policy acts, in which the reference is measured, seconds.
    0: no reference but the promises; hours: the reference is good and the policy never acts."""
    ramp_s: float = 60.0
    """Time over which the residual grows from 0 to 1, seconds. 0: at once; long: harm shows while
    it is small, and so does good."""
    cool_down_s: float = 300.0
    """Time under the static plan after the first trip, its probation included, seconds; doubles
    with each trip that is remembered. At least `probation_s` counts."""
    most_trips: int = 3
    """So many remembered trips latch the static plan until the operator releases it. 1: the first
    one does; large: only the cool-down protects."""
    trip_memory_s: float = 3600.0
    """How long a trip counts, seconds. 0: none ever latches; a month: three bad minutes do."""
    loss_allowance_s: float = 2.0
    """Loss that trips, in seconds of all demand. 0: noise trips; 60: a minute's worth of demand is
    lost for each trip."""
    loss_drift: float = 0.002
    """Loss that never trips, part of the demand. 0: every policy trips in the end, by noise; 0.1:
    a tenth of all demand can be lost unseen."""
    slow_wait_fraction: float = 0.1
    """A tier whose target is beyond 20 s counts as missing from this part of its target in the
    queue on, more the longer. 1: only missed deadlines count, minutes after the cause; 0: every
    queue does."""
    fair_reference: float = 0.98
    """A reference that keeps less than this part of the promises grows old (`reference_s`), as
    under it a policy could do harm unseen. 0: none does; above 1: every one does."""
    reference_s: float = 300.0
    """After so long a poor reference is measured again in a new probation, seconds."""
    canary_fraction: float = 0.25
    """Part of the residual that canary mode applies, in [0, 1]."""
    novel_fraction: float = 0.1
    """An observation with more than this part of its entries outside of the envelope of training
    is novel. 0: one entry is enough; 1: none ever is."""
    novel_intervals: int = 6
    """So many novel observations of the last `novel_window` fall back, until none of them is. 1:
    one is enough."""
    novel_window: int = 10
    """Observations that are looked back on, at least `novel_intervals`: with fewer none falls
    back. To switch the envelope off set `novel_fraction` to 1."""
    mismatch_intervals: int = 2
    """So many intervals in a row in which the engine keeps to another allocation than asked fall
    back. 1: a request that is on its way does."""
    mismatch_tolerance: float = 1e-6
    """Relative difference of a knob that is no mismatch. Less than the engine's rounding: all are
    mismatches."""
    settling_s: float = 5.0
    """Demand that may be lost for each trip beside the account, in seconds of all demand: late
    misses, the backlog left behind, best-effort tiers. Only `budget` uses it; measured."""

    def trips_within(self, length_s: float) -> int:
        """Most trips that fit into a run: each waits out the cool-down of the one before."""
        from_s, trips = self.probation_s, 0
        while trips < self.most_trips and from_s < length_s:
            from_s += max(self.cool_down_s * 2.0**trips, self.probation_s)
            trips += 1
        return trips

    def budget(self, length_s: float) -> float:
        """Weighted attainment that a guarded policy may cost against static, in [0, 1].

        drift + trips x (allowance + settling) / length, at most 1.

        Args:
            length_s: Length of the traffic, seconds; at most `trip_memory_s`.
        """
        per_trip_s = self.loss_allowance_s + self.settling_s
        return min(1.0, self.loss_drift + self.trips_within(length_s) * per_trip_s / length_s)
