"""How many prefill tokens one request may add to the step: rules 4, 13, 16 over the running totals.

It knows one step's totals and one request at a time; whose turn it is, `plan_fair` decides, and how
far its media items let it go, `item_limits`.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.encoding import hold_items
from trimtab.engine_bridge.replay.item_limits import pay, reach
from trimtab.engine_bridge.replay.layout import (
    BUDGET,
    CHUNKS,
    DECODING,
    ENCODE_MS,
    ENCODED,
    LIMIT,
    LOW,
    OPEN,
    PADDED,
    PAIRS,
    SPARED,
    TOKENS,
    WORK,
    State,
)
from trimtab.engine_bridge.rules.budget import chunk_within, predicted_step_ms, step_limit_ms
from trimtab.engine_bridge.rules.speculation import drafting_ms


@inlined
def _limit_ms(s: State) -> float:
    """Rule 13: the tightest of the protected running requests' limits, in believed model time."""
    e = s.engine[0]
    limit = np.inf
    if e.rule_slack == 0:
        return limit
    for slot in range(e.running):
        r = s.req[s.running[slot]]
        tier = s.tiers[r.tier]
        if r.status == DECODING and tier.protected == 1 and tier.tpot_s < np.inf:
            slack_s = r.due_base_s + e.step * tier.tpot_s - e.now_s
            # A step that gives several tokens may take their time.
            pace_s = tier.tpot_s * (s.drafting[r.tier].step_tokens if r.ahead > 0 else 1.0)
            limit = min(limit, step_limit_ms(pace_s, slack_s, e.tpot_fraction, e.slack_fraction))
    return limit / e.scale - drafting_ms(
        s.draft_cost[0], s.draft_cost[1], float(e.ahead), float(e.longest)
    )


@inlined
def _contended(s: State) -> bool:
    """Whether a protected tier is there to be hurt by low tiers' prefill."""
    for t in range(len(s.tiers)):
        tier = s.tiers[t]
        if tier.protected == 1 and tier.running + tier.waiting > 0:
            return True
    return False


@inlined
def open_step(s: State) -> None:
    """Begin the totals of a step without prefill yet."""
    e, totals = s.engine[0], s.totals
    totals[TOKENS] = totals[CHUNKS] = totals[PAIRS] = totals[PADDED] = 0.0
    totals[ENCODED] = totals[ENCODE_MS] = totals[WORK] = 0.0
    e.item_held = 0
    totals[BUDGET] = e.max_tokens - e.decoding - e.ahead
    if e.rule_budget == 1:
        totals[BUDGET] = min(float(e.budget), totals[BUDGET])
    totals[LIMIT] = _limit_ms(s)
    pay(s)
    totals[OPEN] = 1.0
    totals[SPARED] = 0.0
    totals[LOW] = 0.0 if e.rule_slack == 1 and _contended(s) else -1.0


@compiled
def chunk(s: State, row: int, computed: int, first_pass: bool) -> int:
    """Tokens that this request may add to the step now; 0 closes the step when time is up."""
    e, r, totals = s.engine[0], s.req[row], s.totals
    tier = s.tiers[r.tier]
    room = int(totals[BUDGET] - totals[TOKENS] - totals[WORK])
    if first_pass:
        room = min(room, int(tier.prefill_share * totals[BUDGET]) - tier.granted)
    if tier.low == 1 and totals[LOW] >= 0.0:
        room = min(room, max(1, int(e.low_share * totals[BUDGET])) - int(totals[LOW]))
    most = min(r.target - computed - r.grant, room)
    if most <= 0:
        return 0
    limit, needed = totals[LIMIT], 0
    beside_spared = r.spared == 0 and totals[SPARED] > 0.0
    if r.spared == 0:
        limit = min(limit, e.longest_step_ms / e.scale)
    if beside_spared:
        # Beside spared prompts a little prefill goes on: they must not stop the line for good.
        totals[OPEN] = 0.0
        most = min(most, max(0, e.min_chunk - int(totals[TOKENS] - totals[SPARED])))
    if r.media_count > 0 and e.encoding == 1 and most > 0:
        most, encode_ms, needed = reach(s, row, computed, most, room, limit)
        limit -= encode_ms
    else:
        limit -= totals[ENCODE_MS]
    if limit == np.inf or beside_spared or most <= 0:
        return most
    cached = float(computed + r.grant)
    chunks, tokens, pairs = totals[CHUNKS], totals[TOKENS], totals[PAIRS]
    if r.grant > 0:
        chunks -= 1.0
    whole_ms = predicted_step_ms(
        s.coef,
        float(e.decoding),
        float(e.read_tokens),
        chunks + 1.0,
        tokens + most,
        pairs + most * (cached + 0.5 * most),
        float(e.ahead),
    )
    if whole_ms <= limit:
        return most
    within = chunk_within(
        s.coef,
        limit,
        float(e.decoding),
        float(e.read_tokens),
        chunks,
        tokens,
        pairs,
        cached,
        most,
        float(e.ahead),
    )
    # A little prefill always goes on: late decodes must not stop the line for good.
    least = min(most, max(0, e.min_chunk - int(tokens)))
    totals[OPEN] = 0.0
    return max(within, least, needed)


@inlined
def grant(s: State, row: int, tokens: int) -> None:
    """Add tokens of a request to the step; fewer where an item has no room in the encoder cache."""
    e, r, totals = s.engine[0], s.req[row], s.totals
    tier = s.tiers[r.tier]
    work = totals[WORK]
    if r.media_count > 0 and e.encoding == 1:
        tokens = hold_items(s, row, r.computed + r.grant, tokens)
        if tokens == 0:
            return
    work = int(totals[WORK] - work)
    before = float(r.computed + r.grant)
    if r.grant == 0:
        totals[CHUNKS] += 1.0
    totals[TOKENS] += tokens
    if r.spared == 1:
        totals[SPARED] += tokens
    totals[PAIRS] += tokens * (before + 0.5 * tokens)
    if tier.low == 1 and totals[LOW] >= 0.0:
        totals[LOW] += tokens + work
    tier.granted += tokens + work
    r.grant += tokens
