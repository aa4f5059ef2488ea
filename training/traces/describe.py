"""Summaries of traces for people and machines. It changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trimtab.engine_bridge.media import MEDIA_KINDS
from trimtab.engine_bridge.trace import NO_SESSION, Trace

_QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


def describe(trace: Trace) -> dict[str, Any]:
    """Summarise a trace.

    Returns:
        JSON-ready: `rows`, `span_s`, `rate_per_s`, `cv` (of inter-arrivals of open-loop requests
        and first turns; None where it is not defined), `tokens`, `tenants`, `sessions`,
        `reusable_prompt_share` (of prompt tokens, with an unbounded cache), `media` (how many,
        distinct ones, requests that have any, tokens by kind, their share of prompt tokens), the
        same by tier in `tiers`, `notes`, `digest`.
    """
    reusable = reusable_tokens(trace)
    everything = np.arange(len(trace))
    summary = _summary(trace, everything, reusable)
    summary["silent_minutes"] = _silent_minutes(trace)
    summary["tiers"] = {
        name: _summary(trace, np.flatnonzero(trace.tier == number), reusable)
        for number, name in enumerate(trace.tier_names)
    }
    summary["stop_reasons"] = {
        name or "unknown": int(count)
        for name, count in zip(
            trace.stop_names,
            np.bincount(trace.stop_reason, minlength=len(trace.stop_names)),
            strict=True,
        )
    }
    summary["notes"] = list(trace.notes)
    summary["digest"] = trace.digest()
    return summary


def reusable_tokens(trace: Trace) -> npt.NDArray[np.int64]:
    """Prompt tokens of each row that an earlier row had (a cache without bounds), shape (n,).

    Equal ids mean equal prefixes, so the blocks that were seen are the leading ones.
    """
    lengths = np.diff(trace.prefix_offsets)
    if not len(trace.prefix_ids):
        return np.zeros(len(trace), np.int64)
    first_row = np.full(int(trace.prefix_ids.max()) + 1, len(trace), np.int64)
    rows = np.repeat(np.arange(len(trace)), lengths)
    np.minimum.at(first_row, trace.prefix_ids, rows)
    seen = first_row[trace.prefix_ids] < rows
    blocks = np.bincount(rows[seen], minlength=len(trace))
    block = trace.prefix_block_tokens.astype(np.int64)
    full = trace.prompt_tokens // np.maximum(block, 1)
    return np.minimum(blocks, full) * block


def _summary(
    trace: Trace, rows: npt.NDArray[np.int64], reusable: npt.NDArray[np.int64]
) -> dict[str, Any]:
    arrival = trace.arrival_s[rows]
    prompt, output = trace.prompt_tokens[rows], trace.output_tokens[rows]
    span = float(arrival[-1] - arrival[0]) if len(rows) else 0.0
    sessions = trace.session[rows]
    total = int(prompt.sum(dtype=np.int64))
    return {
        "rows": len(rows),
        "span_s": round(span, 6),
        "rate_per_s": round(len(rows) / span, 6) if span > 0 else None,
        "cv": _cv(arrival[trace.turn[rows] == 0]),
        "prompt_tokens": _spread(prompt),
        "output_tokens": _spread(output),
        "tenants": len(np.unique(trace.tenant[rows])),
        "sessions": len(np.unique(sessions[sessions != NO_SESSION])),
        "reusable_prompt_share": round(int(reusable[rows].sum()) / total, 4) if total else 0.0,
        "media": _media(trace, rows, total),
    }


def _media(trace: Trace, rows: npt.NDArray[np.int64], prompt_tokens: int) -> dict[str, Any]:
    items = trace.media.take(rows)
    sums = np.bincount(items.kind, weights=items.tokens, minlength=len(MEDIA_KINDS))
    counts = np.bincount(items.kind, minlength=len(MEDIA_KINDS))
    return {
        "items": len(items),
        "distinct": len(np.unique(items.content)),
        "requests": int(np.count_nonzero(np.diff(items.offsets))),
        "kinds": {
            name: {"items": int(count), "tokens": int(tokens)}
            for name, count, tokens in zip(MEDIA_KINDS, counts, sums, strict=True)
        },
        "prompt_share": round(float(sums.sum()) / prompt_tokens, 4) if prompt_tokens else 0.0,
    }


def _cv(arrival_s: npt.NDArray[np.float64]) -> float | None:
    gaps = np.diff(arrival_s)
    if len(gaps) < 2 or gaps.mean() <= 0:
        return None
    return round(float(gaps.std() / gaps.mean()), 4)


def _spread(tokens: npt.NDArray[np.int32]) -> dict[str, float]:
    if not len(tokens):
        return {"total": 0, "mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0}
    marks = {name: float(np.quantile(tokens, q)) for name, q in _QUANTILES}
    total = int(tokens.sum(dtype=np.int64))
    return {
        "total": total,
        "mean": round(total / len(tokens), 2),
        **marks,
        "max": int(tokens.max()),
    }


def _silent_minutes(trace: Trace) -> int:
    if not len(trace):
        return 0
    minutes = np.floor(trace.arrival_s / 60.0).astype(np.int64)
    minutes -= minutes[0]
    return int(minutes[-1] + 1 - len(np.unique(minutes)))
