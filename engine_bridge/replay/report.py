"""What the replay tells: telemetry of an interval, and the result of a run.

It reads the state and resets the interval's counters; it moves nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.replay.layout import FINISHED, NONE, Records, State
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry

_COUNTERS = (
    "arrivals",
    "arrived_tokens",
    "prefill_tokens",
    "decode_tokens",
    "finished",
    "refused",
    "judged",
    "met",
    "preemptions",
    "recomputed",
    "skewed",
    "cached",
)


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """A finished (or stopped) run."""

    requests: Mapping[str, npt.NDArray[np.generic]]
    """One row a request, in the trace's order; NaN where something did not happen. `arrival_s` is
    when it really arrived (closed loop), `tier` the plan's tier number, `outcome` 0 unfinished,
    1 finished, 2 refused at once, 3 shed, 4 cancelled."""
    telemetry: tuple[Telemetry, ...]
    steps: int
    engine_busy_s: float
    end_s: float
    service_gap_ms: float
    """Largest difference of normalised service between two tiers while both waited and neither was
    held back by limits of its own, milliseconds."""
    service_gap_bound_ms: float
    """What rule 3 allows for this run's largest request and step (docs/fairness.md)."""
    tenant_service_ms: Mapping[tuple[int, int], float]
    """Engine time by tier and tenant number."""

    def digest(self) -> str:
        """SHA-256 over every request's fate: equal digests mean equal runs."""
        sha = hashlib.sha256()
        for name in sorted(self.requests):
            sha.update(name.encode())
            sha.update(np.ascontiguousarray(self.requests[name]).tobytes())
        sha.update(f"{self.steps} {self.end_s!r} {self.engine_busy_s!r}".encode())
        return sha.hexdigest()


def request_columns(s: State, tenant: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[np.generic]]:
    """The columns of `ReplayResult.requests`; `tenant` as the trace numbers them."""
    req = s.req
    finished = req.outcome == FINISHED
    generated = np.where(finished, req.output, req.generated)
    estimate = np.where(req.first_estimate_ms > 0, req.first_estimate_ms, np.nan)
    return {
        "arrival_s": req.arrived_s.copy(),
        "tier": req.tier.astype(np.int32),
        "tenant": tenant.copy(),
        "admitted_s": req.admitted_s.copy(),
        "first_token_s": req.first_s.copy(),
        "last_token_s": np.where(finished, req.last_s, np.nan),
        "prompt_tokens": req.prompt.copy(),
        "cached_tokens": req.cached.copy(),
        "output_tokens": req.output.copy(),
        "generated_tokens": generated.astype(np.int32),
        "preemptions": req.preemptions.copy(),
        "recomputed_tokens": req.recomputed.copy(),
        "outcome": req.outcome.astype(np.int8),
        "vft_skew": np.where(finished, req.service_ms / estimate - 1.0, np.nan),
        "service_ms": req.service_ms.copy(),
    }


def _lent(s: State) -> npt.NDArray[np.int64]:
    """Blocks of each pool's guarantee that other pools hold: excess, spread over the idle parts."""
    excess = int(np.maximum(0, s.pools.held - s.pools.guaranteed).sum())
    idle = np.maximum(0, s.pools.guaranteed - s.pools.held).astype(np.int64)
    return excess * idle // max(1, int(idle.sum()))


def _quantiles(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    if not len(values):
        return float("nan"), float("nan")
    p50, p99 = np.quantile(values, (0.5, 0.99))
    return float(p50), float(p99)


def _tier(s: State, number: int, firsts: Records, done: Records, lent: int) -> TierTelemetry:
    t, e = s.tiers[number], s.engine[0]
    first = firsts[firsts.tier == number]
    ended = done[(done.tier == number) & (done.outcome == FINISHED) & (done.output > 1)]
    ttft = _quantiles((first.first_s - first.arrived_s) * 1e3)
    tpot = _quantiles((ended.last_s - ended.first_s) / (ended.output - 1) * 1e3)
    oldest = 0.0 if t.first == NONE else float(e.now_s - s.req[t.first].arrived_s)
    pool = s.pools[t.pool]
    return TierTelemetry(
        arrivals=int(t.arrivals),
        arrived_prompt_tokens=int(t.arrived_tokens),
        queue_length=int(t.waiting),
        queued_prefill_tokens=int(t.waiting_tokens),
        oldest_wait_s=oldest,
        running=int(t.running),
        kv_blocks_used=int(pool.held),
        kv_blocks_guaranteed=int(pool.guaranteed),
        kv_blocks_lent=lent,
        prefill_tokens=int(t.prefill_tokens),
        decode_tokens=int(t.decode_tokens),
        cached_tokens=int(t.cached),
        finished=int(t.finished),
        refused=int(t.refused),
        attainment=float(t.met / t.judged) if t.judged else float("nan"),
        attainment_samples=int(t.judged),
        ttft_ms_p50=ttft[0],
        ttft_ms_p99=ttft[1],
        tpot_ms_p50=tpot[0],
        tpot_ms_p99=tpot[1],
        preemptions=int(t.preemptions),
        recomputed_tokens=int(t.recomputed),
        acceptance=float("nan"),
        vft_skew_flags=int(t.skewed),
        service_ms=float(t.service_ms),
    )


def take_telemetry(
    s: State, *, interval_s: float, busy_ms: float, applied: Allocation
) -> Telemetry:
    """Report the interval that ends now and reset its counters.

    Args:
        s: The replay's memory, settled (`loop.settle_interval`).
        interval_s: Length of the interval.
        busy_ms: Step time in the interval.
        applied: The allocation that holds.
    """
    e = s.engine[0]
    firsts = s.req[s.first_log[: e.firsts]]
    done = s.req[s.done_log[: e.dones]]
    lent = _lent(s)
    steps = int(e.interval_steps)
    telemetry = Telemetry(
        time_s=float(e.now_s),
        interval_s=interval_s,
        tiers=tuple(
            _tier(s, number, firsts, done, int(lent[s.tiers[number].pool]))
            for number in range(len(s.tiers))
        ),
        step_ms_mean=busy_ms / steps if steps else float("nan"),
        steps=steps,
        batch_mean=float(e.interval_batch / steps) if steps else float("nan"),
        kv_use_fraction=float(s.pools.held.sum() / e.total_blocks),
        busy_fraction=min(1.0, busy_ms * 1e-3 / interval_s) if interval_s > 0 else 0.0,
        applied=applied,
        age_s=0.0,
    )
    for counter in _COUNTERS:
        s.tiers[counter][:] = 0
    s.tiers.service_ms[:] = 0.0
    e.interval_steps = e.interval_batch = e.firsts = e.dones = 0
    return telemetry


def pair_bounds_ms(tiers: Records) -> npt.NDArray[np.float64]:
    """Rule 3's bound for every two tiers, shape (tiers, tiers); docs/fairness.md derives it.

    With e a tier's largest estimate, o its largest outstanding estimates and y how far its account
    has run past the tag of its last dispatch, all over weight: 2 max(e_i, e_j) + o_i + o_j + y_i +
    y_j.
    """
    own = tiers.peak_outstanding_ms + tiers.peak_past_tag_ms
    estimate = tiers.peak_estimate_ms
    bounds: npt.NDArray[np.float64] = (
        2.0 * np.maximum(estimate[:, None], estimate) + own[:, None] + own
    )
    np.fill_diagonal(bounds, 0.0)
    return bounds


def gap_bound_ms(s: State) -> float:
    """The largest of rule 3's bounds between two tiers for this run.

    Infinite without the true-up: the long-run shares then rest on the estimates.
    """
    if s.engine[0].rule_true_up == 0:
        return float("inf")
    return float(pair_bounds_ms(s.tiers).max())
