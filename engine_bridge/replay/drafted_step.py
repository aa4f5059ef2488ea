"""One step of the replay in which decodes verify drafts: its time, and which drafts are right.

What follows from it for the requests and the next lengths, `verification` tells. Nothing is drawn:
whether a draft is right follows from its request's number and its place, whoever asks.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.layout import DECODING, State
from trimtab.engine_bridge.replay.steps import (
    advance_prefills,
    book_mixed,
    due_decodes,
    end_in_order,
    run_decodes,
)
from trimtab.engine_bridge.replay.verification import take_verified, verified_ms

_MASK: Final = 0xFFFFFFFF


@inlined
def _mixed_bits(bits: int) -> int:
    """A 32-bit number whose bits all depend on all of the given one's.

    Two multiplications that fit 63 bits, the same in every arithmetic (constants: C. Wellons,
    hash-prospector).
    """
    bits ^= bits >> 16
    bits = (bits * 0x21F0AAAD) & _MASK
    bits ^= bits >> 15
    bits = (bits * 0x735A2D97) & _MASK
    return bits ^ (bits >> 15)


@compiled
def draft_is_right(row: int, position: int, acceptance: float) -> bool:
    """Whether the draft for a place of a request's sequence is the token that the model gives.

    Args:
        row: Of the trace.
        position: Place in prompt and answer together, from 0.
        acceptance: Probability that it is, given that those before it were.
    """
    bits = _mixed_bits(_mixed_bits(int(row) + 1) ^ int(position))
    return bits < acceptance * 4294967296.0


@inlined
def accepted_drafts(row: int, position: int, drafts: int, acceptance: float, kept: float) -> int:
    """How many of a request's drafts, the first of them for `position`, precede the first wrong."""
    accepted = 0
    while accepted < drafts and draft_is_right(row, position + accepted, acceptance):
        accepted += 1
        acceptance *= kept
    return accepted


@inlined
def _note_facts(s: State) -> None:
    """Put what the planned step carries beside drafts into `draft_facts[0]`."""
    e, facts = s.engine[0], s.draft_facts
    facts[0, 0], facts[0, 1] = e.decoding, e.read_tokens
    facts[0, 2] = facts[0, 3] = facts[0, 4] = facts[0, 5] = 0.0
    for at in range(e.prefilling):
        r = s.req[s.prefilling[at]]
        if r.grant > 0:
            facts[0, 2] += 1.0
            facts[0, 3] += r.grant
            facts[0, 4] += r.grant * (r.computed + 0.5 * r.grant)
            facts[0, 5] += r.encode_ms


@compiled
def run_drafted_step(s: State, tokens: int) -> None:
    """Run the planned step, `tokens` of prefill in it; its decodes verify what they have ahead."""
    e = s.engine[0]
    drafts, longest = 0, 0
    for slot in range(e.running):
        row = s.running[slot]
        r = s.req[row]
        if r.status == DECODING and r.ahead > 0:
            drafts += r.ahead
            longest = max(longest, r.ahead)
            r.drafted = r.ahead
            first = r.prompt + r.generated
            r.accepted = accepted_drafts(row, first, r.ahead, r.acceptance, e.draft_kept)
    _note_facts(s)
    ms = verified_ms(s, drafts, longest)
    extra_ms = ms - verified_ms(s, 0, 0) if drafts > 0 else 0.0
    if tokens > 0:
        book_mixed(s, tokens)
    else:
        run_decodes(s, np.inf)
    e.now_s = e.began_s + ms * 1e-3
    e.busy_ms += extra_ms
    advance_prefills(s, due_decodes(s))
    take_verified(s, extra_ms / drafts if drafts > 0 else 0.0)
    ending = 0
    for slot in range(e.running):
        r = s.req[s.running[slot]]
        if r.status == DECODING and r.generated >= r.output:
            s.due[ending] = s.running[slot]
            ending += 1
    end_in_order(s, ending)
