"""How far a chunk may reach into media items under the fair rules, and what a long one owes.

Rules 4, 13 and 16 for items: an item is encoded whole, so that it may be more than any budget or
limit allows. It then has its step to itself, and steps must have stayed under their limits by as
much before the next one. vLLM's own limits are `encoding`'s; text is `chunks`'.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.encoding import first_open, item_work, shown
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
    first = int(r.media_next)
    held = int(r.media_held)
    if r.status != PREFILLING:
        first = held = first_open(s, row, position)
    encode_ms, encode_tokens, freeable, needed = 0.0, 0, int(e.encoder_freeable), 0
    for item in range(max(first, held), r.media_first + r.media_count):
        if s.item_start[item] >= position + most:
            break
        if shown(s, first, item, item):
            continue
        content = s.encoded[s.item_content[item]]
        before = max(0, int(s.item_start[item]) - position)
        if content.cached == 1:
            needs = content.tokens if content.refs == 0 else 0
            if needs > freeable:
                most = before
                break
            freeable -= needs
            continue
        timed = limit_ms < np.inf
        so_far_ms = totals[ENCODE_MS] + encode_ms
        if timed and before > 0 and _believed_ms(s, row, position, before, so_far_ms) > limit_ms:
            # Its text alone is more than the step has time for.
            most = before
            break
        tokens, ms = int(s.item_end[item] - s.item_start[item]), s.item_ms[item]
        fits = tokens <= min(freeable, int(e.encoder_budget - totals[ENCODED]) - encode_tokens)
        crowds = before + 1 + item_work(s, item) > room
        late = ms > 0.0 and timed
        late = late and _believed_ms(s, row, position, before + 1, so_far_ms + ms) > limit_ms
        if crowds or late:
            fits = fits and totals[ENCODED] + encode_tokens == 0
        if crowds:
            fits = fits and before == 0 and totals[TOKENS] == 0.0
        if late and e.encode_debt_ms > 0.0:
            # Where nothing else would run nobody is kept waiting by it.
            fits = fits and before == 0 and totals[TOKENS] == 0.0 and e.decoding == 0
        if not fits:
            most = before
            break
        encode_ms += ms
        encode_tokens += tokens
        freeable -= tokens
        needed = before + 1
        room = 0 if crowds else room - item_work(s, item)
        most = most if crowds else min(most, room)
    if most == 0:
        _hold_back(s, row)
    return most, encode_ms, needed


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
    """A step has run, `encode_ms` of it for items: what that took over its limit is owed."""
    e = s.engine[0]
    if e.mode != FAIR:
        return
    over_ms = min(encode_ms, step_ms - _limit_now_ms(s))
    if over_ms > 0.0:
        e.encode_debt_ms += over_ms
        e.debt_step = e.step
        e.debt_busy_ms = e.busy_ms
