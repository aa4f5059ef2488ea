"""Compiles what a step of the scheduler calls, before the first request comes.

The rules are compiled at their first call, which takes a minute where no cache of it is found; a
request must not wait for that. It decides nothing and leaves nothing behind.
"""

from __future__ import annotations

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.layout import FINISHED
from trimtab.engine_bridge.vllm.draft_books import DraftBooks
from trimtab.engine_bridge.vllm.ledger import ADMIT, DONE, GROW, LOOK_UP, Ledger

_STAYS, _WITHDRAWN, _DEFERRED = "stays", "withdrawn", "deferred"
_BLOCKS = 64


def warm_up(plan: Plan, spec: EngineSpec, *, draft_tokens: int = 0) -> None:
    """Lead three requests through books of their own, by every call that the scheduler makes.

    `draft_tokens` are what the engine drafts; without any, nothing of that is called.
    """
    ledger = Ledger(plan, spec, blocks=_BLOCKS, max_num_seqs=4, accounts=1)
    ledger.set_now(0.0)
    rows = {
        name: ledger.arrive(name, tenant="", tier=0, prompt_tokens=1, arrived_s=0.0, found_blocks=0)
        for name in (_STAYS, _WITHDRAWN, _DEFERRED)
    }
    ledger.enter(0.0)
    ledger.next_shed()
    admitted = _plan_step(ledger, rows[_DEFERRED], len(plan.pools))
    if rows[_WITHDRAWN] in admitted:
        ledger.withdraw_admission(rows[_WITHDRAWN])
    ledger.grants()
    _, facts = ledger.step_facts()
    ledger.book(1.0)
    if draft_tokens:
        books = DraftBooks(ledger, draft_tokens, None)
        books.extra_ms(facts, 1, 1)
        books.take(facts, 0.0)
    ledger.believe(1.0)
    _plan_step(ledger, rows[_DEFERRED], len(plan.pools))
    if rows[_STAYS] in admitted:
        ledger.preempt(rows[_STAYS])
    ledger.next_event_s()
    for name in rows:
        ledger.end(name, FINISHED, 1)
    ledger.tenant_service_ms()
    ledger.apply(ledger.allocation)
    ledger.close_interval(1.0, 0.0)


def _plan_step(ledger: Ledger, deferred: int, pools: int) -> set[int]:
    admitted = set()
    ledger.set_blocks(_BLOCKS, [0] * pools)
    op = ledger.begin()
    while op != DONE:
        row = ledger.op_row
        if op == LOOK_UP and row == deferred:
            ledger.defer(1.0)
        elif op == LOOK_UP:
            ledger.found(row, target_tokens=1, blocks=0, idle_blocks=0)
        elif op == ADMIT:
            ledger.admit(row)
            admitted.add(row)
        elif op == GROW:
            ledger.grow()
        op = ledger.next_op()
    return admitted
