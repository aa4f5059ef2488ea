"""The books of who was left out of a planned step: what they lose, and when to look at them again.

It is asked once everything is handed out (`plan_fair`), and admits nobody.
"""

from __future__ import annotations

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.item_limits import lift_held
from trimtab.engine_bridge.replay.layout import BUDGET, NONE, OPEN, TOKENS, WORK, State
from trimtab.engine_bridge.rules.fair_queue import lift_tier

# Why a tier admits no more in this step (`tier.blocked`): no place in the batch, no tokens for it
# in this pass (open again in the next, but its share kept it out of the first), or a limit of its
# own.
NO_PLACE, NO_TOKENS, REOPENED, HELD = 1, 2, -1, 3


@compiled
def lift_left_out(s: State) -> None:
    """A tier that limits of its own kept out banks no credit from it (rule 3), like an idle one."""
    e = s.engine[0]
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        why = tier.blocked
        # Nobody of it could be next: each tenant of it stands before an item.
        held = e.item_held == 1 and tier.candidate == NONE
        short = why == NO_TOKENS and (held or s.totals[OPEN] == 1.0)
        if e.item_held == 1 and tier.active_count > 0:
            lift_held(s, t)
        if tier.active_count > 0 and (why in (HELD, REOPENED) or short):
            behind_ms = tier.largest_estimate_ms / tier.weight
            lift_tier(s.engine, s.tiers, t, behind_ms)


@inlined
def note_blocked(s: State) -> None:
    """Remember a queue that only an event can move, so that nobody looks at it until then."""
    e, totals = s.engine[0], s.totals
    if e.waiting == 0 or e.epoch != e.seen_epoch or totals[OPEN] == 0.0:
        return
    if totals[TOKENS] + totals[WORK] >= totals[BUDGET] or e.item_held == 1:
        return
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        if tier.candidate != NONE and tier.blocked != NO_PLACE and tier.blocked != HELD:
            # Short of tokens this step: the budget and low shares are new in the next.
            return
    e.blocked_epoch = e.epoch
