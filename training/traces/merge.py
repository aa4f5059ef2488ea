"""Join traces and rework their rows: copies with fresh ids, tenants. It knows no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.media import MediaItems
from trimtab.engine_bridge.trace import NO_SESSION, Trace
from trimtab.training.traces.assemble import (
    Names,
    build_sorted,
    dense_ids,
    offsets_of,
    with_sorted_names,
)

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]

_PLAIN = (
    "prompt_tokens",
    "output_tokens",
    "turn",
    "think_s",
    "prefix_block_tokens",
    "cancel_after_s",
    "acceptance",
)


def merge(traces: Sequence[Trace], where: str = "trace") -> Trace:
    """Join traces into one, sorted by arrival; sessions and prefix ids stay apart.

    Args:
        traces: At least one trace.
        where: Name for errors.
    """
    tiers, tenants, stops = Names(), Names(), Names(("",))
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(trace, name) for trace in traces]) for name in _PLAIN
    }
    for name, names, table in (
        ("tier", tiers, "tier_names"),
        ("tenant", tenants, "tenant_names"),
        ("stop_reason", stops, "stop_names"),
    ):
        columns[name] = np.concatenate(
            [
                np.array([names.number(text) for text in getattr(trace, table)], np.int32)[
                    getattr(trace, name)
                ]
                for trace in traces
            ]
        )
    columns["session"] = _apart([trace.session for trace in traces])
    columns["prefix_ids"] = _apart([trace.prefix_ids for trace in traces])
    columns["prefix_offsets"] = offsets_of(
        np.concatenate([np.diff(trace.prefix_offsets) for trace in traces])
    )
    columns["media"] = _joined([trace.media for trace in traces])
    merged = build_sorted(
        where,
        arrival_s=np.concatenate([trace.arrival_s for trace in traces]),
        tier_names=tiers.names,
        tenant_names=tenants.names,
        stop_names=stops.names,
        **columns,
    )
    notes = tuple(dict.fromkeys(note for trace in traces for note in trace.notes))
    return with_sorted_names(replace(_dense(merged), notes=notes))


def _apart(parts: list[IntArray]) -> IntArray:
    """Numbers of several traces in ranges of their own; negative ones (none) stay."""
    shifted, base = [], 0
    for part in parts:
        shifted.append(np.where(part < 0, part, part.astype(np.int64) + base))
        base += int(part.max(initial=-1)) + 1
    joined = np.concatenate(shifted)
    known = joined >= 0
    joined[known] = dense_ids(joined[known])
    return joined.astype(np.int32)


def _joined(parts: list[MediaItems]) -> MediaItems:
    """The items of traces in a row; what they show stays apart."""
    return MediaItems(
        offsets=offsets_of(np.concatenate([np.diff(part.offsets) for part in parts])),
        kind=np.concatenate([part.kind for part in parts]),
        start_tokens=np.concatenate([part.start_tokens for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        content=_apart([part.content for part in parts]),
    )


def _dense(trace: Trace) -> Trace:
    """Sessions, prefix ids and media contents renumbered to 0..m-1, in the order of their value."""
    session = trace.session.copy()
    known = session != NO_SESSION
    session[known] = dense_ids(session[known])
    media = replace(trace.media, content=dense_ids(trace.media.content))
    return replace(trace, session=session, prefix_ids=dense_ids(trace.prefix_ids), media=media)


def copies(
    trace: Trace,
    rows: LongArray,
    *,
    arrival_s: FloatArray,
    generation: LongArray,
    where: str = "trace",
) -> Trace:
    """Rows of a trace at new times, several times over.

    Args:
        trace: Source.
        rows: Rows to take, shape (k,).
        arrival_s: Their new arrivals, shape (k,).
        generation: Which copy each belongs to, shape (k,): copies share no sessions and no blocks.
        where: Name for errors.
    """
    picked = trace.take(rows)
    sessions = int(trace.session.max(initial=-1)) + 1
    session = picked.session.astype(np.int64)
    known = session != NO_SESSION
    session[known] = dense_ids(session[known] + generation[known] * sessions)
    blocks = int(trace.prefix_ids.max(initial=-1)) + 1
    lift = np.repeat(generation * blocks, np.diff(picked.prefix_offsets))
    shown = int(trace.media.content.max(initial=-1)) + 1
    shows = picked.media.content + np.repeat(generation * shown, np.diff(picked.media.offsets))
    columns: dict[str, Any] = {name: getattr(picked, name) for name in _PLAIN}
    columns["media"] = replace(picked.media, content=dense_ids(shows))
    return build_sorted(
        where,
        arrival_s=arrival_s,
        session=session.astype(np.int32),
        prefix_ids=dense_ids(picked.prefix_ids + lift),
        prefix_offsets=picked.prefix_offsets,
        tier=picked.tier,
        tenant=picked.tenant,
        stop_reason=picked.stop_reason,
        tier_names=trace.tier_names,
        tenant_names=trace.tenant_names,
        stop_names=trace.stop_names,
        notes=trace.notes,
        **columns,
    )


def with_tier(trace: Trace, tier: str) -> Trace:
    """The trace with every row in one tier."""
    return replace(trace, tier=np.zeros(len(trace), np.int32), tier_names=(tier,))


def with_tenants(trace: Trace, tier: str, count: int, rng: np.random.Generator) -> Trace:
    """Spread requests (whole sessions) over tenants of unequal size.

    The tenant of rank r gets a share in proportion to 1 / r (Zipf), which is about how unequal the
    clients of the public traces are: of 8 tenants the largest asks 37 %.

    Args:
        trace: Source.
        tier: Prefix of the tenants' names.
        count: Number of tenants.
        rng: Draws who asks what.
    """
    weights = 1.0 / np.arange(1, count + 1)
    unit = units_of(trace)
    owners = rng.choice(count, size=int(unit.max(initial=-1)) + 1, p=weights / weights.sum())
    digits = len(str(count))
    names = tuple(f"{tier}-{rank:0{digits}d}" for rank in range(1, count + 1))
    return with_sorted_names(
        replace(trace, tenant=owners[unit].astype(np.int32), tenant_names=names)
    )


def with_tenant_prefix(trace: Trace, tier: str) -> Trace:
    """The trace with its tier before every tenant's name, so that tiers share no tenant."""
    names = tuple(
        name if name.startswith(f"{tier}-") else f"{tier}-{name}" for name in trace.tenant_names
    )
    if len(set(names)) < len(names):
        names = tuple(f"{tier}-{name}" for name in trace.tenant_names)
    return with_sorted_names(replace(trace, tenant_names=names))


def units_of(trace: Trace) -> LongArray:
    """What is kept or left out together: the number of each row's session, or of the row itself."""
    keys = np.where(
        trace.session == NO_SESSION,
        -1 - np.arange(len(trace), dtype=np.int64),
        trace.session.astype(np.int64),
    )
    return np.unique(keys, return_inverse=True)[1].reshape(-1).astype(np.int64)


def starts_of(trace: Trace, unit: LongArray) -> FloatArray:
    """Arrival of each unit's first row, shape (units,)."""
    starts = np.full(int(unit.max(initial=-1)) + 1, np.inf)
    np.minimum.at(starts, unit, trace.arrival_s)
    return starts
