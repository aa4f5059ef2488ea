"""Requests that are offered to a replay from outside, and blocks that are brought into its cache.

For a fleet, whose router decides while the engines run where a request goes. It decides nothing.
"""

from __future__ import annotations

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.cached_items import evict, fall_idle
from trimtab.engine_bridge.replay.kv_cache import find_cached
from trimtab.engine_bridge.replay.layout import EVENT_ARRIVAL, NONE, State
from trimtab.engine_bridge.replay.names import new_item
from trimtab.engine_bridge.replay.timers import push_time_event


@compiled
def offer(s: State, row: int, at_s: float) -> None:
    """A request will arrive at that time."""
    push_time_event(s, at_s, row, EVENT_ARRIVAL)
    s.engine[0].left += 1


@compiled
def found_blocks(s: State, row: int) -> int:
    """Leading blocks of a prompt that has not arrived yet which the cache holds now."""
    s.req[row].target = s.req[row].prompt
    named, _, _ = find_cached(s, row)
    return named


@compiled
def fill(s: State, row: int, blocks: int) -> int:
    """Bring the leading blocks of a prompt into the cache, idle, as far as there is room.

    Blocks that running requests hold are left alone; other cached blocks go in rule 7's order.

    Returns:
        Blocks that were brought in.
    """
    e, r = s.engine[0], s.req[row]
    tier = s.tiers[r.tier]
    brought, seen = 0, 0
    room = e.empty_blocks + e.cached_blocks - found_blocks(s, row)
    for place in range(r.prefix_start, r.prefix_start + r.prefix_count):
        run = int(s.prefix_ids[place])
        for k in range(min(int(s.run_blocks[run]), blocks - seen)):
            content = int(s.run_first[run]) + k
            if s.first_item[content] != NONE:
                continue
            if brought >= room:
                return brought
            if e.empty_blocks == 0:
                evict(s, 1, tier.weight)
            e.empty_blocks -= 1
            fall_idle(s, new_item(s, content, 1, tier.pool), r.tier, r.stop)
            brought += 1
        seen += int(s.run_blocks[run])
        if seen >= blocks:
            break
    return brought
