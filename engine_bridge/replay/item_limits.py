"""How far a chunk may reach into media items under the fair rules, and what a long one owes.

Rules 4, 13 and 16 for items: an item is encoded whole, so that it may be more than any budget or
limit allows. It then has its step to itself, and steps must have stayed under their limits by as
much before the next one. vLLM's own limits are `encoding`'s; text is `chunks`'.
"""

from __future__ import annotations

from typing import Final

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.encoding import first_open, found_tokens, item_work
from trimtab.engine_bridge.replay.layout import (
    CHUNKS,
    ENCODE_MS,
    ENCODED,
    FAIR,
    LIMIT,
    PAIRS,
    PREFILLING,
    TOKENS,
    WAITING,
    State,
)
from trimtab.engine_bridge.rules.budget import predicted_step_ms
from trimtab.engine_bridge.rules.fair_queue import tenant_start_ms

LEAST_PAID: Final = 0.02
"""Part of the engine's time by which a debt falls at least: so it is paid in finite time. Steps of
`tpot_fraction` of the TPOT (0.97 by default) and this part more still keep the TPOT."""
SET_ASIDE: Final = 0.1
"""Part of a step's limit that is kept free while there is a debt, so that it is paid soon."""


@inlined
def _believed_ms(s: State, row: int, position: int, tokens: int, encode_ms: float) -> float:
    """The step's time with a chunk of a request and `encode_ms` of encoding in all."""
    e, r, totals = s.engine[0], s.req[row], s.totals
    ms = predicted_step_ms(
        s.coef,
        float(e.decoding),
        float(e.read_tokens),
        totals[CHUNKS] + (0.0 if r.grant > 0 else 1.0),
        totals[TOKENS] + tokens,
        totals[PAIRS] + tokens * (position + 0.5 * tokens),
        float(e.ahead),
    )
    return ms + encode_ms


@inlined
def _is_late(
    s: State, row: int, position: int, tokens: int, encode_ms: float, limit_ms: float
) -> bool:
    """Whether a chunk of so many tokens, with that encoding in all, is more than the limit."""
    return bool(tokens > 0 and _believed_ms(s, row, position, tokens, encode_ms) > limit_ms)


@inlined
def _hold_back(s: State, row: int) -> None:
    """A request stands before an item: in this pass its tenant's next ones wait with it."""
    e, r = s.engine[0], s.req[row]
    e.item_held = 1
    if r.preemptions > 0:
        r.held_mark = e.mark
    elif r.status == WAITING:
        s.tenants[r.tenant].held_mark = e.mark


@inlined
def is_held_back(s: State, row: int) -> bool:
    """Whether this pass has found that a waiting request stands before an item."""
    e, r = s.engine[0], s.req[row]
    mark = r.held_mark if r.preemptions > 0 else s.tenants[r.tenant].held_mark
    return bool(e.item_held == 1 and mark == e.mark)


@inlined
def _may_start(s: State, before: int, crowds: bool, late: bool, alone: bool) -> bool:
    """Whether an item may be encoded that is more than the budget's room, or than the time left.

    Args:
        s: The memory.
        before: Tokens of the chunk before it.
        crowds: It is more than is left of the budget.
        late: With it the step runs over its limit.
        alone: Nothing else is encoded in this step so far.
    """
    first = before == 0 and s.totals[TOKENS] == 0.0
    owed = s.engine[0].encode_debt_ms > 0.0
    # Where nothing else would run nobody is kept waiting by a late one.
    paid = not owed or (first and s.engine[0].decoding == 0)
    return alone and (first or not crowds) and (paid or not late)


@compiled
def lift_held(s: State, number: int) -> None:
    """A tenant whose next request waits for an item's turn banks no credit from it (rule 3).

    In whichever pass that was: the second may have had no time to look at it again.
    """
    e, tier = s.engine[0], s.tiers[number]
    for slot in range(tier.active_start, tier.active_start + tier.active_count):
        tenant = s.tenants[s.active[slot]]
        if tenant.held_mark != e.mark and tenant.held_mark != e.mark - 1:
            continue
        least = tier.tenant_v - tier.largest_estimate_ms / tenant.share
        tenant.account_ms += max(0.0, least - tenant_start_ms(tenant))


@compiled
def reach(
    s: State, row: int, computed: int, most: int, room: int, limit_ms: float
) -> tuple[int, float, int]:
    """How far a request's next chunk may go for its media items.

    Args:
        s: The memory.
        row: The request.
        computed: Its computed tokens, this step's not among them.
        most: Tokens that it may add to the step, at least 1.
        room: What is left of the prefill budget for it, in tokens.
        limit_ms: The step's limit.

    Returns:
        Tokens, 0 if it stands before an item whose turn has not come; milliseconds of encoding that
        come with so many; and the tokens that the chunk needs to reach the last item encoded.
    """
    e, r, totals = s.engine[0], s.req[row], s.totals
    position = computed + r.grant
    first, held = int(r.media_next), int(r.media_held)
    if r.status != PREFILLING:
        first = held = first_open(s, row, position)
    so_far_ms, encoded, freeable = totals[ENCODE_MS], totals[ENCODED], e.encoder_freeable
    needed = 0
    for item in range(max(first, held), r.media_first + r.media_count):
        if s.item_start[item] >= position + most:
            break
        before = max(0, int(s.item_start[item]) - position)
        found = found_tokens(s, first, item)
        if found > freeable:
            most = before
            break
        if found >= 0:
            freeable -= found
            continue
        tokens, ms, work = (
            s.item_end[item] - s.item_start[item],
            s.item_ms[item],
            item_work(s, item),
        )
        if ms > 0.0 and _is_late(s, row, position, before, so_far_ms, limit_ms):
            # Its text alone is more than the step has time for.
            most = before
            break
        crowds = work > 0 and before + 1 + work > room
        late = ms > 0.0 and _is_late(s, row, position, before + 1, so_far_ms + ms, limit_ms)
        fits = tokens <= min(freeable, e.encoder_budget - encoded)
        if fits and (crowds or late):
            fits = _may_start(s, before, crowds, late, encoded == 0.0)
        if not fits:
            most = before
            break
        so_far_ms += ms
        encoded += tokens
        freeable -= tokens
        needed = before + 1 if ms > 0.0 else needed
        room = 0 if crowds else room - work
        most = most if crowds else min(most, room)
    if most == 0:
        _hold_back(s, row)
    return most, so_far_ms, needed


@inlined
def _limit_now_ms(s: State) -> float:
    """The step's limit by rules 13 and 16, in real time."""
    e = s.engine[0]
    return min(s.totals[LIMIT] * e.scale, e.longest_step_ms)


@inlined
def pay(s: State) -> None:
    """A step is to be planned, its limit is known: the steps since the last one have paid."""
    e, totals = s.engine[0], s.totals
    if e.encode_debt_ms == 0.0:
        return
    if e.step > e.debt_step:
        spent_ms = e.busy_ms - e.debt_busy_ms
        under_ms = (e.step - e.debt_step) * _limit_now_ms(s) - spent_ms
        e.encode_debt_ms = max(0.0, e.encode_debt_ms - max(under_ms, LEAST_PAID * spent_ms))
        e.debt_step = e.step
        e.debt_busy_ms = e.busy_ms
    if e.encode_debt_ms > 0.0:
        totals[LIMIT] *= 1.0 - SET_ASIDE


@inlined
def owe(s: State, step_ms: float, encode_ms: float) -> None:
    """A step has run, `encode_ms` of it for items: what that took over its limit is owed.

    Nothing where nobody decodes: nobody has been kept waiting.
    """
    e = s.engine[0]
    if e.mode != FAIR or e.decoding == 0:
        return
    over_ms = min(encode_ms, step_ms - _limit_now_ms(s))
    if over_ms > 0.0:
        e.encode_debt_ms += over_ms
        e.debt_step = e.step
        e.debt_busy_ms = e.busy_ms
