"""Binary heaps of step events (finishes, overruns) and timed events (arrivals, timers).

Keys are compared first, rows second, so that the order never depends on how the heap was built.
"""

from __future__ import annotations

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.layout import Records, State


@compiled
def _before(heap: Records, a: int, b: int) -> bool:
    if heap[a].key != heap[b].key:
        return heap[a].key < heap[b].key
    return heap[a].row < heap[b].row


@compiled
def _swap_steps(heap: Records, a: int, b: int) -> None:
    x, y = heap[a], heap[b]
    key, row, version = x.key, x.row, x.version
    x.key, x.row, x.version = y.key, y.row, y.version
    y.key, y.row, y.version = key, row, version


@compiled
def _swap_times(heap: Records, a: int, b: int) -> None:
    x, y = heap[a], heap[b]
    key, row, kind = x.key, x.row, x.kind
    x.key, x.row, x.kind = y.key, y.row, y.kind
    y.key, y.row, y.kind = key, row, kind


@compiled
def push_step_event(s: State, key: int, row: int, version: int) -> None:
    """Remember to look at a request once the engine has run `key` steps."""
    e, heap = s.engine[0], s.steps
    at = e.step_events
    e.step_events += 1
    last = heap[at]
    last.key, last.row, last.version = key, row, version
    while at > 0 and _before(heap, at, (at - 1) // 2):
        _swap_steps(heap, at, (at - 1) // 2)
        at = (at - 1) // 2


@compiled
def drop_stale_steps(s: State) -> None:
    """Rebuild the full heap of step events without those of requests that moved on."""
    e, heap = s.engine[0], s.steps
    count = e.step_events
    e.step_events = 0
    for at in range(count):
        # What is pushed lands at or before `at`, so nothing unread is overwritten.
        key, row, version = heap[at].key, heap[at].row, heap[at].version
        if s.req[row].version == version:
            push_step_event(s, key, row, version)


@compiled
def drop_step_event(s: State) -> None:
    """Remove the earliest step event."""
    e, heap = s.engine[0], s.steps
    e.step_events -= 1
    count = e.step_events
    _swap_steps(heap, 0, count)
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _before(heap, child + 1, child):
            child += 1
        if not _before(heap, child, at):
            break
        _swap_steps(heap, child, at)
        at = child


@compiled
def push_time_event(s: State, key: float, row: int, kind: int) -> None:
    """Remember to do something to a request at `key` seconds."""
    e, heap = s.engine[0], s.times
    at = e.time_events
    e.time_events += 1
    last = heap[at]
    last.key, last.row, last.kind = key, row, kind
    while at > 0 and _before(heap, at, (at - 1) // 2):
        _swap_times(heap, at, (at - 1) // 2)
        at = (at - 1) // 2


@compiled
def drop_time_event(s: State) -> None:
    """Remove the earliest timed event."""
    e, heap = s.engine[0], s.times
    e.time_events -= 1
    count = e.time_events
    _swap_times(heap, 0, count)
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _before(heap, child + 1, child):
            child += 1
        if not _before(heap, child, at):
            break
        _swap_times(heap, child, at)
        at = child
