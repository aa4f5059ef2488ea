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
from trimtab.engine_bridge.replay.layout import FINISHED, Records, State
from trimtab.engine_bridge.replay.summary import COLUMNS, summarise
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry

_WHOLE = frozenset(
    name for name, kind in TierTelemetry.__annotations__.items() if kind in ("int", int)
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


def _tier(line: list[float]) -> TierTelemetry:
    named = {
        name: int(value) if name in _WHOLE else value
        for name, value in zip(COLUMNS, line, strict=True)
    }
    return TierTelemetry(**named)  # type: ignore[arg-type]


def take_telemetry(
    s: State, handle: State, *, interval_s: float, busy_ms: float, applied: Allocation
) -> Telemetry:
    """Report the interval that ends now and reset its counters.

    Args:
        s: The replay's memory, settled (`loop.settle_interval`).
        handle: The same, for compiled code.
        interval_s: Length of the interval.
        busy_ms: Step time in the interval.
        applied: The allocation that holds.
    """
    e = s.engine[0]
    steps, batch = int(e.interval_steps), int(e.interval_batch)
    table = np.empty((len(s.tiers), len(COLUMNS)))
    summarise(handle, table)
    return Telemetry(
        time_s=float(e.now_s),
        interval_s=interval_s,
        tiers=tuple(_tier(line) for line in table.tolist()),
        step_ms_mean=busy_ms / steps if steps else float("nan"),
        steps=steps,
        batch_mean=batch / steps if steps else float("nan"),
        kv_use_fraction=1.0 - float(e.empty_blocks + e.cached_blocks) / float(e.total_blocks),
        busy_fraction=min(1.0, busy_ms * 1e-3 / interval_s) if interval_s > 0 else 0.0,
        applied=applied,
        age_s=0.0,
    )


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
