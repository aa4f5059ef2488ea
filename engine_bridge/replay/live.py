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
    outlive,
    preempt,
    sync,
)
from trimtab.engine_bridge.replay.loop import REFUSE, SCALE_RATE, run_step, shed_time_s
from trimtab.engine_bridge.replay.plan_fair import begin_plan, next_op
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
    admit(s, row, s.req[row].target)


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
        facts: Filled with decodes, the KV tokens that they read, prefill chunks, their tokens and
            their query-key pairs, shape (5,).
    """
    e = s.engine[0]
    facts[0], facts[1] = e.decoding, e.read_tokens
    facts[2] = facts[3] = facts[4] = 0.0
    for at in range(e.prefilling):
        r = s.req[s.prefilling[at]]
        if r.grant > 0:
            facts[2] += 1.0
            facts[3] += r.grant
            facts[4] += r.grant * (r.computed + 0.5 * r.grant)
    return predicted_step_ms(s.coef, facts[0], facts[1], facts[2], facts[3], facts[4])


@compiled
def book(s: State, speed: float, longer: float) -> None:
    """The planned step has run, `speed` times as long as the model says.

    The model's step is `longer` times the plain one: 1 unless it verified draft tokens, which are
    no drift of the engine.
    """
    e = s.engine[0]
    scale, step = e.scale, e.step
    e.speed = speed * longer
    run_step(s)
    if e.step > step:
        e.scale = scale + SCALE_RATE * (speed - scale)


@compiled
def note_verified(s: State, row: int, drafted: int, accepted: int, ahead: int) -> None:
    """A decode has got `accepted` tokens more in the step that was booked last.

    Call it for each decode of a tier that speculates: it grows by blocks before its tokens are
    sure, for `drafted` drafts in that step and for `ahead` in the next one.
    """
    e, r = s.engine[0], s.req[row]
    if r.status != DECODING:
        return
    sync(s, row)
    tier, size = s.tiers[r.tier], e.block_size
    r.blocks = max(r.blocks, -(-(r.computed + drafted) // size))
    r.computed += accepted
    r.generated += accepted
    r.due_base_s += accepted * tier.tpot_s
    e.read_tokens += accepted
    tier.decode_tokens += accepted
    # Steps until it needs a block: those that it holds are enough for as many tokens more.
    left = max(0, r.blocks * size - r.computed - ahead)
    step = e.step + (1 if e.grown_step == e.step else 0)
    s.grow[tier.pool, r.phase] -= 1
    s.tier_grow[r.tier, r.phase] -= 1
    r.phase = (step + left) % size
    s.grow[tier.pool, r.phase] += 1
    s.tier_grow[r.tier, r.phase] += 1
    if accepted > 0 and r.generated >= r.predicted and r.generated - accepted < r.predicted:
        r.version += 1
        outlive(s, row)


@compiled
def believe(s: State, speed: float) -> None:
    """Refit the engine's drift (rule 13) from a step that was booked before it had ended."""
    e = s.engine[0]
    e.scale += SCALE_RATE * (speed - e.scale)
