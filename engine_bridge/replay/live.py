"""The state as the books of a live engine: what the vLLM plug-in calls, compiled.

Each function is one thing that happens in a real engine, with the replay's own functions. Time,
blocks and output lengths come from the caller. It runs no step and plans none.
"""

from __future__ import annotations

import numpy as np

from trimtab.engine_bridge.compiled import compiled
from trimtab.engine_bridge.replay.heaps import drop_first
from trimtab.engine_bridge.replay.kv_cache import take_growth
from trimtab.engine_bridge.replay.layout import DECODING, EVENT_ELIGIBLE, F8, NONE, State
from trimtab.engine_bridge.replay.lifecycle import (
    admit,
    arrive,
    demote,
    end,
    preempt,
    sync,
)
from trimtab.engine_bridge.replay.loop import REFUSE
from trimtab.engine_bridge.replay.padding import slots
from trimtab.engine_bridge.replay.plan_fair import begin_plan, granted_tokens, next_op
from trimtab.engine_bridge.replay.steps import (
    SCALE_RATE,
    advance_prefills,
    book_mixed,
    due_decodes,
    run_decodes,
)
from trimtab.engine_bridge.replay.timers import shed_time_s
from trimtab.engine_bridge.replay.verification import lengthen, take_verified, verified_ms
from trimtab.engine_bridge.rules.budget import predicted_step_ms


@compiled
def arrive_live(s: State, row: int, at_s: float) -> None:
    """A request comes in; which of its prompt was seen before is known only by what is cached."""
    s.req[row].prompt_worth = np.nan
    arrive(s, row, at_s)


@compiled
def end_live(s: State, row: int, outcome: int, generated: int) -> None:
    """A request is over after that many output tokens."""
    r = s.req[row]
    if r.status == DECODING:
        sync(s, row)
    r.output = max(1, generated)
    end(s, row, outcome)
    r.generated = generated


@compiled
def preempt_live(s: State, row: int) -> None:
    """A running request has given way."""
    preempt(s, row)


@compiled
def admit_live(s: State, row: int) -> None:
    """A waiting request has joined the batch with the blocks that were found."""
    admit(s, row, slots(s, row))


@compiled
def withdraw_live(s: State, row: int) -> None:
    """A request that the plan let join could not: it waits as one that came back, unharmed."""
    r = s.req[row]
    preemptions, tier = r.preemptions, s.tiers[r.tier]
    preempt(s, row)
    # It has given nothing up: rules 6 and 8 must not count this.
    r.eligible_s = s.engine[0].now_s
    tier.preemptions -= 1
    r.lost = 0
    r.preemptions = max(1, preemptions)


@compiled
def open_account(
    s: State, account: int, share: float, bonus: float, predicted_output: float
) -> None:
    """An account begins anew for a tenant that has none."""
    tenant = s.tenants[account]
    tenant.share = share
    tenant.bonus = bonus
    tenant.account_ms = 0.0
    tenant.outstanding_ms = 0.0
    tenant.bypassed_ms = 0.0
    tenant.tail_ms = 0.0
    tenant.predicted_output = predicted_output
    tenant.service_ms = 0.0
    tenant.samples = 0


@compiled
def next_shed(s: State) -> int:
    """The next request that rule 15 gives up; those that go to the back do so here."""
    e = s.engine[0]
    if e.rule_shedding == 0 or e.waiting == 0:
        return NONE
    for t in range(len(s.tiers)):
        while shed_time_s(s, t) <= e.now_s:
            row = s.tiers[t].first
            if s.tiers[t].shed_mode == REFUSE:
                return int(row)
            demote(s, row)
    return NONE


@compiled
def enter(s: State, now_s: float) -> int:
    """It is `now_s`: let back-offs run out; a row to be shed first, or NONE."""
    e = s.engine[0]
    e.now_s = now_s
    while e.time_events > 0 and s.times[0].key <= now_s:
        if s.times[0].tag == EVENT_ELIGIBLE:
            e.epoch += 1
        drop_first(s.times, e.time_events)
        e.time_events -= 1
    return next_shed(s)


@compiled
def begin(s: State) -> int:
    """Begin the plan of a step, and go on to the first thing to be done."""
    begin_plan(s)
    return next_op(s)


@compiled
def grow(s: State) -> None:
    """The decodes of the planned step get their new blocks: note how many, by pool."""
    take_growth(s)


@compiled
def step_facts(s: State, facts: F8) -> float:
    """What the planned step carries, and the step-time model's milliseconds for it.

    Args:
        s: The books.
        facts: Filled with decodes, the KV tokens that they read, prefill chunks, their tokens,
            their query-key pairs, and the milliseconds of the items that are encoded, shape (6,).
    """
    e = s.engine[0]
    facts[0], facts[1] = e.decoding, e.read_tokens
    facts[2] = facts[3] = facts[4] = facts[5] = 0.0
    for at in range(e.prefilling):
        r = s.req[s.prefilling[at]]
        if r.grant > 0:
            facts[2] += 1.0
            facts[3] += r.grant
            facts[4] += r.grant * (r.computed + 0.5 * r.grant)
            facts[5] += r.encode_ms
    ms = predicted_step_ms(s.coef, facts[0], facts[1], facts[2], facts[3], facts[4])
    return ms + facts[5]


@compiled
def book(s: State, speed: float, draft_ms: float) -> None:
    """The planned step has run, `speed` times as long as the model says.

    The model's step is `draft_ms` longer than that of `step_facts`: what drafts add to it.
    """
    e = s.engine[0]
    e.speed = speed
    tokens = granted_tokens(s)
    if tokens > 0:
        book_mixed(s, tokens)
    elif e.decoding > 0:
        run_decodes(s, np.inf)
    else:
        return
    lengthen(s, speed * draft_ms)
    # Who is done, the engine tells: here only predictions that are outlived.
    advance_prefills(s, due_decodes(s))


@compiled
def draft_ms(s: State, facts: F8, drafts: int, longest: int) -> float:
    """What drafts add to the model's time of a step: see `verification.verified_ms`."""
    e = s.engine[0]
    speed = e.speed
    e.speed = 1.0
    s.draft_facts[0, :] = facts
    ms = verified_ms(s, drafts, longest) - verified_ms(s, 0, 0)
    e.speed = speed
    return ms


@compiled
def verified(s: State, facts: F8, draft_ms: float) -> None:
    """The drafts of the step that was booked last are verified: see `verification`.

    Args:
        s: The books; `drafted` and `accepted` of each request tell what it verified.
        facts: What that step carried beside drafts, shape (6,).
        draft_ms: What one of its drafts took of its time.
    """
    s.draft_facts[0, :] = facts
    take_verified(s, draft_ms)


@compiled
def believe(s: State, speed: float) -> None:
    """Refit the engine's drift (rule 13) from a step that was booked before it had ended."""
    e = s.engine[0]
    e.scale += SCALE_RATE * (speed - e.scale)
