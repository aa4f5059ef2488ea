"""When to look at a request again: at a time, or at a step. What happens then, `loop` decides."""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.heaps import push
from trimtab.engine_bridge.replay.layout import FAIR, NONE, State


@inlined
def push_time_event(s: State, key: float, row: int, kind: int) -> None:
    """Remember to do something to a request at `key` seconds."""
    e = s.engine[0]
    push(s.times, e.time_events, key, row, kind)
    e.time_events += 1


@compiled
def _drop_stale_steps(s: State) -> None:
    """Rebuild the full heap of step events without those of requests that moved on."""
    e, heap = s.engine[0], s.steps
    count, kept = e.step_events, 0
    for at in range(count):
        # What is pushed lands at or before `at`, so nothing unread is overwritten.
        key, row, version = heap[at].key, heap[at].row, heap[at].tag
        if s.req[row].version == version:
            push(heap, kept, key, row, version)
            kept += 1
    e.step_events = kept


@compiled
def plan_step_event(s: State, row: int) -> None:
    """Wake up at the request's last token, or where it outlives its predicted output."""
    e, r = s.engine[0], s.req[row]
    last = r.output
    if e.mode == FAIR and r.generated < r.predicted:
        last = min(last, r.predicted)
    if e.step_events == len(s.steps):
        _drop_stale_steps(s)
    push(s.steps, e.step_events, float(e.step + last - r.generated), row, r.version)
    e.step_events += 1


@inlined
def shed_time_s(s: State, number: int) -> float:
    """When the tier's longest waiting request becomes too late (rule 15)."""
    tier = s.tiers[number]
    if tier.shed_mode == 0 or tier.first == NONE or s.req[tier.first].demoted == 1:
        return np.inf
    return s.req[tier.first].arrived_s + tier.shed_at * tier.shed_target_s


@inlined
def next_event_s(s: State) -> float:
    """The earliest time at which something other than a step happens."""
    e = s.engine[0]
    at = np.inf
    if e.next_open < len(s.open_rows):
        at = s.arrival_s[s.open_rows[e.next_open]]
    if e.time_events > 0:
        at = min(at, s.times[0].key)
    if e.mode == FAIR and e.rule_shedding == 1 and e.waiting > 0:
        for t in range(len(s.tiers)):
            at = min(at, shed_time_s(s, t))
    return at
