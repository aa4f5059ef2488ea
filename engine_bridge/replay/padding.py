"""What vLLM adds to a prompt of which one token is left, when it drafts.

Its batch of decodes must be of one shape, so the last token is scheduled with as many placeholders
as a decode has drafts. They take time and blocks and give nothing.
"""

from __future__ import annotations

from trimtab.engine_bridge.compiled import inlined
from trimtab.engine_bridge.replay.layout import BUDGET, PADDED, TOKENS, State


@inlined
def padding(s: State, row: int, computed: int) -> int:
    """Placeholders that a request may get which has `computed` tokens and joins the batch now."""
    return s.engine[0].draft_most if s.req[row].target - computed == 1 else 0


@inlined
def slots(s: State, row: int) -> int:
    """Tokens that a request which joins under the fair rules takes blocks for, as looked up."""
    e, r = s.engine[0], s.req[row]
    return r.target + padding(s, row, min(r.found_blocks * e.block_size, r.target - 1))


@inlined
def has_room_padded(s: State, row: int, computed: int) -> bool:
    """Whether the step may carry the last token of a prompt with its padding."""
    e, totals = s.engine[0], s.totals
    more = padding(s, row, computed)
    left = e.max_tokens - e.decoding - e.ahead - totals[TOKENS] - totals[PADDED]
    return more == 0 or 1 + more <= left


@inlined
def reserve(s: State, row: int) -> None:
    """Keep tokens of the step for the padding of who has just joined; it may come to nothing."""
    e, r, totals = s.engine[0], s.req[row], s.totals
    totals[PADDED] += padding(s, row, r.computed)
    room = float(e.max_tokens - e.decoding - e.ahead) - totals[PADDED]
    totals[BUDGET] = min(totals[BUDGET], room)


@inlined
def pad(s: State) -> None:
    """Grant who joins with one token left its padding, unless a running prefill has a chunk."""
    e = s.engine[0]
    for at in range(e.prefilling):
        r = s.req[s.prefilling[at]]
        if r.grant > 0 and r.joined_step != e.step:
            return
    for at in range(e.prefilling):
        r = s.req[s.prefilling[at]]
        if r.grant > 0 and (r.computed > 0 or e.decoding > 0):
            r.grant += padding(s, s.prefilling[at], r.computed)
