"""Drafts that a step has verified: what they teach, what they cost, and the requests' own numbers.

The same for the replay and for the books of a live engine. It runs no step (`drafted_step`, `live`)
and chooses no length itself (`rules.draft_lengths`).
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.layout import DECODING, State
from trimtab.engine_bridge.replay.lifecycle import outlive, sync, use
from trimtab.engine_bridge.rules import draft_lengths
from trimtab.engine_bridge.rules.speculation import drafting_ms
from trimtab.engine_bridge.step_time import (
    decode_attention_ms,
    linear_ms,
    mixed_attention_ms,
    prefill_attention_ms,
)

NO_DRAFTS, ONE_LENGTH, BY_TIER = 0, 1, 2
"""Values of `engine.drafting`: nobody is drafted for; as stock vLLM; rule 9."""


@inlined
def lengthen(s: State, draft_ms: float) -> None:
    """The step that was booked last took longer than without drafts."""
    e = s.engine[0]
    e.now_s += draft_ms * 1e-3
    e.busy_ms += draft_ms


@inlined
def verified_ms(s: State, drafts: int, longest: int) -> float:
    """How long the step takes that `draft_facts[0]` describes, with drafts beside it, ms.

    Part by part as `steps` adds it up, so that without drafts it is the same bit for bit.
    """
    e, facts = s.engine[0], s.draft_facts
    decodes, read, chunks, tokens = facts[0, 0], facts[0, 1], facts[0, 2], facts[0, 3]
    linear = linear_ms(s.coef, tokens + decodes + drafts, decodes + chunks) * e.speed
    attention = 0.0
    if chunks > 0:
        attention = prefill_attention_ms(s.coef, chunks, tokens, facts[0, 4]) * e.speed
    reading = decode_attention_ms(s.coef, decodes, read)
    reading += mixed_attention_ms(s.coef, tokens, decodes, read)
    reading *= e.speed
    cost = s.draft_cost
    drafting = drafting_ms(cost[0], cost[1], float(drafts), float(longest)) * e.speed
    return linear + attention + reading + drafting + facts[0, 5] * e.speed


@inlined
def _length(s: State, row: int) -> int:
    """Drafts that a decode verifies in the next step."""
    e, r = s.engine[0], s.req[row]
    if np.isnan(r.acceptance):
        return 0
    if e.drafting == ONE_LENGTH:
        return e.draft_most
    return draft_lengths.length_now(s.drafting[r.tier], e.draft_steps)


@compiled
def _observe(s: State) -> None:
    """Count what the decodes have verified."""
    e = s.engine[0]
    for t in range(len(s.drafting)):
        s.drafting[t].decoding = 0
    for slot in range(e.running):
        r = s.req[s.running[slot]]
        if r.status != DECODING:
            continue
        tier = s.drafting[r.tier]
        if e.step > r.sync_step:
            # Else its prompt was complete with this step.
            tier.steps += 1
        if not np.isnan(r.acceptance):
            tier.decoding += 1
        if r.drafted > 0:
            tier.drafts += r.drafted
            tier.right += r.accepted
            tier.interval_drafts += r.drafted
            tier.interval_accepted += r.accepted
            draft_lengths.observe(tier, e.draft_kept, r.drafted, r.accepted)


@compiled
def take_verified(s: State, draft_ms: float) -> None:
    """Learn from the step that was booked last, and choose what is verified in the next.

    Each request's `drafted` and `accepted` tell of the step, `draft_facts[0]` what it carried
    beside drafts; a draft took `draft_ms` of its time.
    """
    e = s.engine[0]
    _observe(s)
    if e.drafting == BY_TIER:
        draft_lengths.choose(
            s.coef,
            s.drafting,
            s.draft_facts[0],
            s.draft_facts[1],
            s.draft_cost,
            e.draft_kept,
            e.draft_steps,
        )
    e.draft_steps += 1
    e.longest = 0
    for slot in range(e.running):
        row = s.running[slot]
        if s.req[row].status == DECODING:
            ahead = _length(s, row)
            e.longest = max(e.longest, ahead)
            _note_verified(s, row, ahead, draft_ms)


@compiled
def _note_verified(s: State, row: int, ahead: int, draft_ms: float) -> None:
    """Put a decode's numbers right after its step; it verifies `ahead` drafts in the next one.

    It grows by blocks before its tokens are sure.
    """
    e, r = s.engine[0], s.req[row]
    sync(s, row)
    tier, size = s.tiers[r.tier], e.block_size
    if r.drafted > 0:
        use(s, row, r.drafted * draft_ms)
        r.blocks = max(r.blocks, -(-(r.computed + r.drafted) // size))
        gained = min(int(r.accepted), r.output - r.generated)
        r.computed += gained
        r.generated += gained
        r.due_base_s += gained * tier.tpot_s
        e.read_tokens += gained
        tier.decode_tokens += gained
        r.drafted = r.accepted = 0
    e.ahead += ahead - r.ahead
    r.ahead = ahead
    # Steps until it needs a block: those that it holds are enough for as many tokens more.
    left = min(max(0, r.blocks * size - r.computed - ahead), size - 1)
    step = e.step + (1 if e.grown_step == e.step else 0)
    s.grow[tier.pool, r.phase] -= 1
    s.tier_grow[r.tier, r.phase] -= 1
    r.phase = (step + left) % size
    s.grow[tier.pool, r.phase] += 1
    s.tier_grow[r.tier, r.phase] += 1
    if r.predicted <= r.generated < r.output:
        r.version += 1
        outlive(s, row)
