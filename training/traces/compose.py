"""Compose one multi-tenant trace out of several: which feeds which tier, at what load.

It reads no files; `part_files` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.errors import FlagError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces.balance import TOLERANCE, balanced_factors, weigh
from trimtab.training.traces.merge import merge, with_tenant_prefix, with_tenants, with_tier
from trimtab.training.traces.part import Part, supply_of

DEFAULT_TENANTS: Final = 8
LONGEST_DEFAULT_S: Final = 3600.0


def compose(
    parts: Sequence[Part],
    *,
    load: float | None,
    spec: EngineSpec | None,
    rng: np.random.Generator,
    duration_s: float | None = None,
    shares: Mapping[str, float] | None = None,
) -> Trace:
    """Compose a trace.

    Args:
        parts: At least one; parts of one tier share its load in proportion to their own rates.
        load: Offered load as a share of the engine's capacity; None keeps the recorded rates.
        spec: The engine, where there is a load.
        rng: Draws shifts, session starts, tenants and who is left out.
        duration_s: Composed span; None = the shortest open-loop part's, an hour at most.
        shares: Share of the load by tier; `DEFAULT_SHARES` for the others.

    Returns:
        The trace, with names in natural order and notes on every change.

    Raises:
        FlagError: a share, load, offset or duration is out of bounds.
        TraceError: no rate of the parts gives the load.
    """
    span_s = _span_s(parts, duration_s)
    supplies = [supply_of(part, span_s, int(rng.integers(2**62))) for part in parts]
    factors = [1.0] * len(parts)
    if load is not None and spec is not None:
        factors = balanced_factors(parts, supplies, load, spec, span_s, shares or {})
    elif shares:
        raise FlagError("--share", remedy="shares need --load and --engine")
    pieces: list[Trace] = []
    for part, supply, factor in zip(parts, supplies, factors, strict=True):
        piece = _owned(part, supply.take(factor), np.random.default_rng(rng.integers(2**62)))
        note = f"{part.name}: {factor:.3g} times its own rate, in {part.tier}."
        pieces.append(replace(piece, notes=(*piece.notes, note)))
    trace = merge([piece for piece in pieces if len(piece)])
    if load is None or spec is None:
        return trace
    return _with_miss(trace, load, weigh([trace], spec, span_s)[0])


def _with_miss(trace: Trace, load: float, reached: float) -> Trace:
    """The trace with a note where its load is not the one that was asked for."""
    if abs(reached / load - 1.0) <= TOLERANCE:
        return trace
    note = (
        f"Offered load {reached:.3f} instead of {load:g}: around it one session more or less "
        "decides whether the others stay in the cache."
    )
    return replace(trace, notes=(*trace.notes, note))


def default_duration_s(parts: Sequence[Part]) -> float:
    """The shortest open-loop part's span, an hour at most; batches and agents have none."""
    spans = [part.span_s for part in parts if part.span_s >= 1.0]
    return min([LONGEST_DEFAULT_S, *spans])


def check_duration(span_s: float) -> None:
    """Refuse spans that nothing can be composed over.

    Raises:
        FlagError: it is not from 1 second to 3 years.
    """
    if not 1.0 <= span_s <= 1e8:
        raise FlagError("--duration-s", value=span_s, bound="from 1 to 1e8 seconds")


def _span_s(parts: Sequence[Part], duration_s: float | None) -> float:
    if not parts:
        raise FlagError("--tier", remedy="name at least one, for instance --tier T0=azure.csv")
    span_s = default_duration_s(parts) if duration_s is None else duration_s
    check_duration(span_s)
    for part in parts:
        if not 0 <= part.offset_s < span_s:
            raise FlagError(
                "--offset",
                key=part.tier,
                value=part.offset_s,
                bound=f"from 0 to below the duration of {span_s:g} s",
            )
    return span_s


def _owned(part: Part, piece: Trace, rng: np.random.Generator) -> Trace:
    """A part's rows in its tier, with its tenants."""
    piece = with_tier(piece, part.tier)
    count = part.tenants
    if count is None and len(part.trace.tenant_names) == 1:
        count = DEFAULT_TENANTS
    if count is None:
        return with_tenant_prefix(piece, part.tier)
    return with_tenants(piece, part.tier, count, rng)
