"""What a seed varies in recorded traffic: when it happens to meet, not what it is.

Seed 0 is the trace as recorded. Any other seed moves every tenant's stream by its own offset, and
every session (or lone request) by a little more, so that bursts of different tenants coincide
otherwise. Lengths, prefixes, think times, order inside a session, and each tenant's own
burstiness above a second stay as recorded. It draws no new traffic.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.engine_bridge.trace import NO_SESSION, Trace

TENANT_OFFSET_S = 30.0
"""Each tenant's stream moves by up to this, either way."""
SESSION_JITTER_S = 1.0
"""Each session or lone request moves by up to this more, either way."""
_OFFSET_FRACTION = 0.02


def vary(trace: Trace, seed: int) -> Trace:
    """The trace as seed `seed` sees it: the same requests, sorted by their new arrivals."""
    if seed == 0 or not len(trace):
        return trace
    rng = np.random.default_rng([seed, len(trace)])
    reach_s = min(TENANT_OFFSET_S, _OFFSET_FRACTION * trace.duration_s)
    jitter_s = min(SESSION_JITTER_S, reach_s)
    offset_s = rng.uniform(-reach_s, reach_s, len(trace.tenant_names))
    unit = session_rows(trace)
    moved_s = rng.uniform(-jitter_s, jitter_s, len(trace))[unit] + offset_s[trace.tenant[unit]]
    start_s = trace.arrival_s[unit]
    # What would leave the recorded span is reflected into it, so that no load is lost at its ends.
    inside_s = np.abs(start_s + moved_s)
    inside_s = trace.duration_s - np.abs(trace.duration_s - inside_s)
    arrival_s = np.maximum(trace.arrival_s + (inside_s - start_s), 0.0)
    order = np.argsort(arrival_s, kind="stable")
    return replace(trace, arrival_s=arrival_s).take(order)


def session_rows(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """For each row the row of its session's first turn; its own row without a session."""
    rows = np.arange(len(trace))
    member = np.flatnonzero(trace.session != NO_SESSION)
    if not len(member):
        return rows
    _, first, inverse = np.unique(trace.session[member], return_index=True, return_inverse=True)
    rows[member] = member[first[inverse.ravel()]]
    return rows
