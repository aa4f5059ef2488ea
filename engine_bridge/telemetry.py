"""Telemetry: what an engine reports of one control interval, per tier and in all.

It only reports: nothing here judges or smooths. NaN stands for "no data", never for zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from trimtab.engine_bridge.allocation import Allocation


@dataclass(frozen=True, kw_only=True)
class TierTelemetry:
    """One tier in one interval; counts are of the interval, levels are at its end."""

    arrivals: int
    """Requests that arrived."""
    arrived_prompt_tokens: int
    """Prompt tokens of the requests that arrived."""
    queue_length: int
    """Requests that wait, level."""
    queued_prefill_tokens: int
    """Prompt tokens that the waiting requests still need computed, level."""
    oldest_wait_s: float
    """Wait of the request that has waited longest, seconds, level; 0 without a queue."""
    running: int
    """Requests in the batch, level."""
    kv_blocks_used: int
    """KV blocks that the running requests of the tier's pool hold, level."""
    kv_blocks_guaranteed: int
    """KV blocks that the tier's pool is guaranteed, level."""
    kv_blocks_lent: int
    """Guaranteed blocks of the tier's pool that other pools' requests hold, level."""
    prefill_tokens: int
    """Prompt tokens computed."""
    decode_tokens: int
    """Tokens generated."""
    cached_tokens: int
    """Prompt tokens that the cache saved from being computed."""
    finished: int
    """Requests that ended with their last token."""
    refused: int
    """Requests that were answered with an error, early or late."""
    attainment: float
    """Share of the requests judged in the interval that met their targets, NaN without any. A
    request is judged when it ends or misses its first deadline, whichever is earlier."""
    attainment_samples: int
    """Requests judged in the interval."""
    met_tokens: float
    """Priced tokens (`pricing`) of the requests judged in the interval that met their targets. A
    live engine takes the prompt tokens that it found cached for the repeated ones."""
    ttft_ms_p50: float
    """Median time to first token, milliseconds; NaN without data."""
    ttft_ms_p99: float
    """99th percentile of the time to first token, milliseconds; NaN without data."""
    tpot_ms_p50: float
    """Median time per output token, milliseconds; NaN without data."""
    tpot_ms_p99: float
    """99th percentile of the time per output token, milliseconds; NaN without data."""
    preemptions: int
    """Requests that lost their place in the batch."""
    recomputed_tokens: int
    """Tokens computed again after a preemption."""
    acceptance: float
    """Share of draft tokens accepted, in [0, 1]; NaN without speculation."""
    vft_skew_flags: int
    """Finished requests whose virtual finish was off by more than the plan's fraction."""
    service_ms: float
    """Engine time spent on the tier, milliseconds."""

    @property
    def has_attainment(self) -> bool:
        """Whether `attainment` says anything."""
        return self.attainment_samples > 0 and math.isfinite(self.attainment)


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """One engine in one control interval."""

    time_s: float
    """End of the interval, seconds from the start of the run."""
    interval_s: float
    """Length of the interval, seconds."""
    tiers: tuple[TierTelemetry, ...]
    """One entry a tier, in the plan's order."""
    step_ms_mean: float
    """Mean time of a step, milliseconds; NaN without a step."""
    steps: int
    """Steps that ended in the interval."""
    batch_mean: float
    """Mean number of requests in a step; NaN without a step."""
    kv_use_fraction: float
    """Part of all KV blocks that running requests hold, level."""
    busy_fraction: float
    """Part of the interval in which a step ran."""
    applied: Allocation
    """The allocation that the engine kept to at the end of the interval."""
    age_s: float
    """Time since these figures were true, seconds; 0 when fresh."""
    read_back: bool = False
    """Whether `applied` was asked of the engine just now, however old the other figures are."""

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """Itself: nothing in it can change."""
        return self
