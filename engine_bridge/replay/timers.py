"""When to look at a request again: at a time, or at a step. What happens then, `loop` decides."""

from __future__ import annotations

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.heaps import push
from trimtab.engine_bridge.replay.layout import FAIR, State


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
