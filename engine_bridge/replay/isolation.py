"""Rule 16: whose prompts are spared of their neighbours' prefill, and that they go first.

How long a step may then be, `chunks` says. It changes no account and no order of dispatches, so
rule 3's bound knows nothing of it.
"""

from __future__ import annotations

from trimtab.engine_bridge.compiled import compiled, inlined
from trimtab.engine_bridge.replay.layout import NONE, State


@compiled
def is_spared(s: State, row: int) -> int:
    """Whether its tenant has little of the engine's work when this request arrives.

    Work is counted in tokens to be computed before the next token comes out: of all that runs or
    waits, this request included. They need no estimate, and stand for time and blocks alike.
    """
    e, own = s.engine[0], s.req[row]
    every = float(own.target)
    for t in range(len(s.tiers)):
        every += s.tiers[t].waiting_tokens
    mine = float(own.target)
    for slot in range(e.running):
        r = s.req[s.running[slot]]
        every += r.target
        if r.tenant == own.tenant:
            mine += r.target
    most = e.spared_fraction * every
    other = s.lists[own.tenant].head
    while other != NONE and mine <= most:
        if other != row:
            mine += s.req[other].target
        other = s.req[other].next
    return 1 if mine <= most else 0


@inlined
def first_of_tier(s: State, mark: int, row: int) -> int:
    """The tier's next spared prefill if there is one, else `row`, the prefill that is next."""
    best = row
    for at in range(s.engine[0].prefilling):
        other = s.prefilling[at]
        r = s.req[other]
        if r.mark == mark or r.spared == 0 or r.tier != s.req[row].tier:
            continue
        if s.req[best].spared == 0 or r.finish_tag_ms < s.req[best].finish_tag_ms:
            best = other
    return best


@inlined
def candidate_first(s: State, number: int, row: int) -> bool:
    """Whether the tier's candidate comes before the running prefill that is next."""
    if row == NONE:
        return True
    tier, r = s.tiers[number], s.req[row]
    spared = s.req[tier.candidate].spared
    if r.tier == number and spared != r.spared:
        return bool(spared == 1)
    return bool(tier.candidate_finish_ms < r.finish_tag_ms)
