"""What the replay tells: telemetry of an interval, and the result of a run.

It only reads; `summary` sums the intervals up.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.replay.layout import FINISHED, State
from trimtab.engine_bridge.replay.records import Records
from trimtab.engine_bridge.replay.summary import COLUMNS, HEADS
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry

_WHOLE = tuple(TierTelemetry.__annotations__[name] in ("int", int) for name in COLUMNS)


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """What one tier's requests have verified in a run."""

    drafts: int
    """Draft tokens."""
    accepted: int
    """Of them, those that were right with all before them."""
    steps: int
    """Steps of its decoding requests, each request's counted apart."""


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """A finished (or stopped) run."""

    requests: Mapping[str, npt.NDArray[np.generic]]
    """One row a request, in the trace's order; NaN where something did not happen. `arrival_s` is
    when it really arrived (closed loop), `tier` the plan's tier number, `outcome` 0 unfinished,
    1 finished, 2 refused at once, 3 shed, 4 cancelled."""
    telemetry: Sequence[Telemetry]
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
    encode_ms: npt.NDArray[np.float64]
    """Engine time that encoding each request's media items took, shape (requests,)."""
    drafts: tuple[DraftCounts, ...] = ()
    """By tier; empty for an engine without a draft model."""

    def digest(self) -> str:
        """SHA-256 over every request's fate: equal digests mean equal runs."""
        sha = hashlib.sha256()
        for name in sorted(self.requests):
            sha.update(name.encode())
            sha.update(np.ascontiguousarray(self.requests[name]).tobytes())
        sha.update(f"{self.steps} {self.end_s!r} {self.engine_busy_s!r}".encode())
        return sha.hexdigest()


def draft_counts(s: State) -> tuple[DraftCounts, ...]:
    """What each tier has verified so far; empty where the engine drafts nothing."""
    if s.engine[0].drafting == 0:
        return ()
    return tuple(
        DraftCounts(drafts=int(d.drafts), accepted=int(d.right), steps=int(d.steps))
        for d in s.drafting
    )


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
        name: int(value) if whole else _known(value)
        for name, whole, value in zip(COLUMNS, _WHOLE, line, strict=True)
    }
    return TierTelemetry(**named)  # type: ignore[arg-type]


def _known(value: float) -> float:
    """The value; no data is one and the same NaN, so that equal telemetry compares equal."""
    return value if value == value else math.nan


class TelemetryLog(Sequence[Telemetry]):
    """The telemetry of every interval so far; each is put into words only when it is read."""

    def __init__(self) -> None:
        """Begin an empty log."""
        self._tables: list[npt.NDArray[np.float64]] = []
        self._heads: list[npt.NDArray[np.float64]] = []
        self._applied: list[Allocation] = []

    def add(
        self,
        tables: npt.NDArray[np.float64],
        heads: npt.NDArray[np.float64],
        applied: Allocation,
    ) -> None:
        """Append intervals under one allocation.

        Args:
            tables: As `summary.summarise` fills them, shape (intervals, tiers, COLUMNS).
            heads: As `summary.head` fills them, shape (intervals, HEADS).
            applied: The allocation that held at the end of each.
        """
        self._tables.extend(tables)
        self._heads.extend(heads)
        self._applied.extend([applied] * len(tables))

    def __len__(self) -> int:
        """Number of intervals."""
        return len(self._tables)

    @overload
    def __getitem__(self, index: int) -> Telemetry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Telemetry, ...]: ...
    def __getitem__(self, index: int | slice) -> Telemetry | tuple[Telemetry, ...]:
        """One interval's telemetry, or several intervals'."""
        if isinstance(index, slice):
            return tuple(self[at] for at in range(*index.indices(len(self))))
        line = map(_known, self._heads[index].tolist())
        head: dict[str, Any] = dict(zip(HEADS, line, strict=True))
        return Telemetry(
            tiers=tuple(_tier(line) for line in self._tables[index].tolist()),
            steps=int(head.pop("steps")),
            applied=self._applied[index],
            age_s=0.0,
            **head,
        )


def pair_bounds_ms(
    tiers: Records, *, displacing: bool = False, aging_ms: float = 0.0
) -> npt.NDArray[np.float64]:
    """Rule 3's bound for every two tiers, shape (tiers, tiers); docs/fairness.md derives it.

    With e a tier's largest estimate, o its largest outstanding estimates and y how far its account
    has run past the tag of its last dispatch, all over weight: 2 (e_i + e_j) + o_i + o_j + y_i +
    y_j. If higher tiers may displace lower ones at the batch cap, twice the largest e of all
    counts, once more for every other tier k, and 2 (o_k + y_k) is added. Twice the window of ageing
    between tiers, `aging_ms`, is added in both cases.
    """
    own = tiers.peak_outstanding_ms + tiers.peak_past_tag_ms
    estimate = tiers.peak_estimate_ms
    both = own[:, None] + own
    bounds: npt.NDArray[np.float64] = 2.0 * (estimate[:, None] + estimate) + both
    if displacing:
        bounds = 2.0 * (2 * (len(own) - 1) * estimate.max() + own.sum()) - both
    bounds += 2.0 * aging_ms
    np.fill_diagonal(bounds, 0.0)
    return bounds


def gap_bound_ms(s: State) -> float:
    """The largest of rule 3's bounds between two tiers for this run.

    Infinite without the true-up: the long-run shares then rest on the estimates.
    """
    e = s.engine[0]
    if e.rule_true_up == 0:
        return float("inf")
    displacing, aging_ms = e.rule_cap == 1, float(e.age_tiers_ms)
    return float(pair_bounds_ms(s.tiers, displacing=displacing, aging_ms=aging_ms).max())
