"""How much of each part makes a trace of a given load: shares of tiers, then the total.

It composes nothing; it asks the supplies for more or less and weighs what they give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.cache_reach import find_reuse, kept_tokens
from trimtab.engine_bridge.capacity import offered_load, request_cost_ms, saturated_step
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import FlagError, TraceError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.merge import merge
from trimtab.training.traces.part import Part
from trimtab.training.traces.supply import Supply

FloatArray = npt.NDArray[np.float64]

DEFAULT_SHARES: Final[Mapping[str, float]] = {"T0": 0.45, "T1": 0.25, "T2": 0.20, "T3": 0.10}
"""Share of the offered load of each tier, renormalised over the tiers at hand."""
OTHER_SHARE: Final = 0.20
"""Share of a tier with another name, before renormalising."""
TOLERANCE: Final = 0.02
"""Relative miss of the load that is good enough; more than that is noted."""
_MOST_MISS = 0.1
_AIM = 0.003
_MOST_FACTOR = 1000.0
_SHARE_ROUNDS = 5
_TOTAL_ROUNDS = 14
_SHRINKS = (0.8, 0.5, 0.25)
_NARROWEST = 1e-3


def tier_shares(tiers: Sequence[str], given: Mapping[str, float]) -> dict[str, float]:
    """Share of the load by tier, with sum 1.

    Given shares hold; what they leave goes to the other tiers by `DEFAULT_SHARES`.

    Raises:
        FlagError: a share is for no tier at hand or out of bounds, or they do not sum to 1.
    """
    names = list(dict.fromkeys(tiers))
    for tier, share in given.items():
        if tier not in names:
            raise FlagError("--share", value=tier, bound=f"a tier with a file: {', '.join(names)}")
        if not 0 < share <= 1:
            raise FlagError("--share", key=tier, value=share, bound="above 0, at most 1")
    left = 1.0 - sum(given.values())
    free = {name: DEFAULT_SHARES.get(name, OTHER_SHARE) for name in names if name not in given}
    if left < -1e-9 or (free and left <= 1e-9) or (not free and abs(left) > 1e-9):
        bound = "below 1 in sum" if free else "1 in sum"
        raise FlagError("--share", value=round(sum(given.values()), 6), bound=bound)
    total = sum(free.values())
    return {name: given[name] if name in given else left * free[name] / total for name in names}


def balanced_factors(
    parts: Sequence[Part],
    supplies: Sequence[Supply],
    load: float,
    spec: EngineSpec,
    span_s: float,
    given: Mapping[str, float],
) -> list[float]:
    """The factor of each part's rate at which the whole offers `load`, split by the shares.

    What a request costs depends on what else runs (long contexts make batches small and push each
    other out of the cache), so that the factors are found together: first rounds weigh each part
    inside the whole, the others move the total only, because whole sessions make shares coarse.
    """
    if not 0 < load <= 10:
        raise FlagError("--load", value=load, bound="above 0, at most 10")
    shares = tier_shares([part.tier for part in parts], given)
    own = weigh([supply.take(1.0) for supply in supplies], spec, span_s)[1]
    targets = _targets(parts, own, shares, load)
    factors = [target / mine for target, mine in zip(targets, own, strict=True)]
    for _ in range(_SHARE_ROUNDS):
        parted = weigh(_taken(supplies, factors), spec, span_s)[1]
        # The load grows faster than the rates, by up to their cube: full steps would overshoot.
        steps = [(t / p) ** 0.6 if p > 0 else 2.0 for t, p in zip(targets, parted, strict=True)]
        factors = [f * min(max(step, 0.25), 4.0) for f, step in zip(factors, steps, strict=True)]
    best = _scaled(supplies, factors, [True] * len(parts), load, spec, span_s)
    for shrink in _SHRINKS:
        # Where one more session pushes the others out of the cache the load jumps, maybe over the
        # one that is asked for: with fewer of them the other parts can come up to it.
        open_loop = [not len(part.trace.prefix_ids) for part in parts]
        if best[0] <= TOLERANCE or all(open_loop) or not any(open_loop):
            break
        fewer = [f if free else f * shrink for f, free in zip(factors, open_loop, strict=True)]
        found = _scaled(supplies, fewer, open_loop, load, spec, span_s)
        best = min(best, found, key=lambda entry: entry[0])
    if best[0] <= _MOST_MISS:
        return best[1]
    raise TraceError(
        parts[0].name,
        key="load",
        value=f"missed by {best[0]:.1%}",
        bound=f"within {_MOST_MISS:.0%} of {load:g}",
        remedy="take a longer --duration-s, another --load or another --seed",
    )


def _scaled(
    supplies: Sequence[Supply],
    factors: Sequence[float],
    free: Sequence[bool],
    load: float,
    spec: EngineSpec,
    span_s: float,
) -> tuple[float, list[float]]:
    """Scale the free factors alike to meet `load`; the relative miss and the factors."""
    scale, low, high = 1.0, 0.0, np.inf
    best = (np.inf, list(factors))
    for _ in range(_TOTAL_ROUNDS):
        scaled = [f * scale if may else f for f, may in zip(factors, free, strict=True)]
        reached = weigh(_taken(supplies, scaled), spec, span_s)[0]
        best = min(best, (abs(reached / load - 1.0), scaled), key=lambda entry: entry[0])
        if best[0] < _AIM or high - low < _NARROWEST * scale:
            break
        low, high = (scale, high) if reached < load else (low, scale)
        step = scale * min(max(load / max(reached, 1e-9), 0.25), 4.0) ** 0.6
        scale = step if low < step < high else (low + min(high, 2.0 * low)) / 2.0
    return best


def _taken(supplies: Sequence[Supply], factors: Sequence[float]) -> list[Trace]:
    for supply, factor in zip(supplies, factors, strict=True):
        if factor > _MOST_FACTOR:
            raise TraceError(
                supply.name,
                value=f"{factor:.0f} copies",
                bound=f"at most {_MOST_FACTOR:g}",
                remedy="too light for that load: take a longer or heavier trace, or a lower --load",
            )
    return [supply.take(factor) for supply, factor in zip(supplies, factors, strict=True)]


def _targets(
    parts: Sequence[Part], own: Sequence[float], shares: Mapping[str, float], load: float
) -> list[float]:
    """Load of each part: its tier's share, split by what the tier's parts ask for by themselves."""
    of_tier = dict.fromkeys(shares, 0.0)
    for part, mine in zip(parts, own, strict=True):
        if mine <= 0:
            raise TraceError(part.name, remedy="nothing of it falls into the composed span")
        of_tier[part.tier] += mine
    return [
        load * shares[part.tier] * mine / of_tier[part.tier]
        for part, mine in zip(parts, own, strict=True)
    ]


def weigh(pieces: Sequence[Trace], spec: EngineSpec, span_s: float) -> tuple[float, list[float]]:
    """Offered load of the pieces together, and how much of it each one is."""
    names = tuple(f"{number}" for number in range(len(pieces)))
    marked = [
        replace(piece, tenant=np.full(len(piece), number, np.int32), tenant_names=names)
        for number, piece in enumerate(pieces)
        if len(piece)
    ]
    if not marked:
        return 0.0, [0.0] * len(pieces)
    whole = merge(marked)
    cost_ms = _costs_ms(whole, spec)
    reached = offered_load(whole, spec)
    if not np.isfinite(reached):
        # Nothing but batches: what they ask for is spread over the span.
        reached = float(cost_ms.sum()) / (span_s * 1e3)
    owner = np.array([int(name) for name in whole.tenant_names])[whole.tenant]
    parted = np.bincount(owner, weights=cost_ms, minlength=len(pieces)) / cost_ms.sum()
    return reached, [float(reached * fraction) for fraction in parted]


def _costs_ms(trace: Trace, spec: EngineSpec) -> FloatArray:
    """About what each request costs; only the split between the parts hangs on it."""
    prompt = trace.prompt_tokens.astype(np.int64)
    kept = np.zeros(len(trace), np.int64)
    if spec.enable_prefix_caching and len(trace.prefix_ids):
        reuse = find_reuse(trace)
        step = saturated_step(spec, prompt - reuse.cached_tokens, prompt, trace.output_tokens)
        kept = kept_tokens(
            trace,
            reuse,
            asked_s=trace.arrival_s,
            service_s=trace.output_tokens.astype(np.float64) * (step.step_ms / 1e3),
            cache_tokens=float(spec.kv_tokens),
        )
    return request_cost_ms(spec, prompt - kept, prompt, trace.output_tokens)
