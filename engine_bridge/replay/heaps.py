"""A binary heap of events in a record array: steps to look at, or times at which something is due.

Keys are compared first, rows second, so that the order never depends on how the heap was built. The
caller keeps the count and what an event means.
"""

from __future__ import annotations

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.records import Records


@compiled
def _before(heap: Records, a: int, b: int) -> bool:
    if heap[a].key != heap[b].key:
        return heap[a].key < heap[b].key
    return heap[a].row < heap[b].row


@compiled
def _swap(heap: Records, a: int, b: int) -> None:
    x, y = heap[a], heap[b]
    key, row, tag = x.key, x.row, x.tag
    x.key, x.row, x.tag = y.key, y.row, y.tag
    y.key, y.row, y.tag = key, row, tag


@compiled
def push(heap: Records, count: int, key: float, row: int, tag: int) -> None:
    """Add an event to a heap that holds `count`."""
    at = count
    last = heap[at]
    last.key, last.row, last.tag = key, row, tag
    while at > 0 and _before(heap, at, (at - 1) // 2):
        _swap(heap, at, (at - 1) // 2)
        at = (at - 1) // 2


@compiled
def drop_first(heap: Records, count: int) -> None:
    """Remove the earliest event of a heap that holds `count`."""
    count -= 1
    _swap(heap, 0, count)
    at = 0
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _before(heap, child + 1, child):
            child += 1
        if not _before(heap, child, at):
            break
        _swap(heap, child, at)
        at = child
