"""What a run is worth: demand in priced tokens, and which of it was served within its targets.

The one scoring function of training and what-if. It knows no engine and no policy: columns of
numbers in, columns of numbers out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.pricing import priced_tokens
from trimtab.engine_bridge.trace import Trace

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

UNFINISHED, FINISHED, REFUSED, SHED, CANCELLED = range(5)
"""Outcomes of a request, as the replay numbers them."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Latency targets by tier, milliseconds, shape (tiers,); infinity where a tier has none."""

    ttft_ms: FloatArray
    tpot_ms: FloatArray
    e2e_ms: FloatArray


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """What each request lived through, shape (n,); NaN where it never happened."""

    ttft_ms: FloatArray
    tpot_ms: FloatArray
    e2e_ms: FloatArray


@dataclass(frozen=True, kw_only=True)
class Met:
    """Which requests kept which target, shape (n,). A tier without a target keeps it by ending."""

    ttft: BoolArray
    tpot: BoolArray
    e2e: BoolArray
    every: BoolArray
    """All targets of its tier, and served: what counts as attained."""


def targets(plan: Plan) -> Targets:
    """The plan's targets."""

    def column(kind: str) -> FloatArray:
        given = [getattr(tier.targets, kind) for tier in plan.tiers.values()]
        return np.array([np.inf if target is None else target for target in given])

    return Targets(ttft_ms=column("ttft_ms"), tpot_ms=column("tpot_ms"), e2e_ms=column("e2e_ms"))


def demand(trace: Trace, tier_values: FloatArray) -> FloatArray:
    """Value that each request asks for, shape (n,).

    Tier value x (fresh prompt tokens + 0.1 x repeated prompt tokens + 3 x output tokens) / 1000.

    Args:
        trace: the traffic.
        tier_values: value of 1,000 fresh prompt tokens, by index into `trace.tier_names`.
    """
    return np.asarray(tier_values[trace.tier] * priced_tokens(trace) / 1000.0, np.float64)


def latencies(
    *,
    arrival_s: FloatArray,
    first_token_s: FloatArray,
    last_token_s: FloatArray,
    generated_tokens: npt.NDArray[np.integer],
) -> Latencies:
    """TTFT, TPOT and E2E of each request in milliseconds; NaN where a token never came.

    TPOT is (last token - first token) / (tokens - 1), NaN for an answer of one token.
    """
    after_first = np.where(generated_tokens > 1, generated_tokens - 1.0, np.nan)
    return Latencies(
        ttft_ms=(first_token_s - arrival_s) * 1e3,
        tpot_ms=(last_token_s - first_token_s) * 1e3 / after_first,
        e2e_ms=(last_token_s - arrival_s) * 1e3,
    )


def judge(
    *, tier: npt.NDArray[np.integer], outcome: npt.NDArray[np.integer], seen: Latencies, to: Targets
) -> Met:
    """Which requests were served within their tier's targets.

    A refused, shed, lost or unfinished request keeps none. A request that its client cancelled is
    judged by the tokens it got: served if the first came in time and the others kept the pace;
    not served if it gave up before the first. It never ended, so it has no E2E to miss.
    """
    cancelled = outcome == CANCELLED
    served = (outcome == FINISHED) | (cancelled & np.isfinite(seen.ttft_ms))
    ttft = served & (seen.ttft_ms <= to.ttft_ms[tier])
    slow = seen.tpot_ms > to.tpot_ms[tier]
    tpot = served & ~slow
    e2e = served & (cancelled | (seen.e2e_ms <= to.e2e_ms[tier]))
    return Met(ttft=ttft, tpot=tpot, e2e=e2e, every=ttft & tpot & e2e)


def weighted_attainment(demanded: FloatArray, met: BoolArray) -> float:
    """Demand served within its targets over demand, in [0, 1]; NaN where nothing was demanded."""
    total = float(demanded.sum())
    return float(demanded[met].sum()) / total if total > 0 else float("nan")


def jain_index(shares: FloatArray) -> float:
    """Jain's index (sum x)^2 / (n sum x^2) of finite shares: 1 is even; NaN without any."""
    finite = shares[np.isfinite(shares)]
    squares = float((finite**2).sum())
    if not len(finite):
        return float("nan")
    return float(finite.sum()) ** 2 / (len(finite) * squares) if squares > 0 else 1.0
