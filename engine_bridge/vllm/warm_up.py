"""Compiles what the scheduler calls, before the first request: a step must not wait for a compiler.

It plays a few requests on books of its own and throws them away.
"""

from __future__ import annotations

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.replay.layout import CANCELLED, FINISHED, NONE
from trimtab.engine_bridge.vllm.ledger import ADMIT, DONE, LOOK_UP, Ledger

_BLOCKS = 64
_STEP_S = 0.01


def warm_up(plan: Plan, spec: EngineSpec) -> None:
    """Call everything once that `Ledger` has compiled."""
    ledger = Ledger(plan, spec, blocks=_BLOCKS, max_num_seqs=4, accounts=1)
    for number in range(4):
        ledger.arrive(
            str(number),
            tenant="warm-up",
            tier=number % len(plan.tiers),
            prompt_tokens=2 * spec.block_size,
            arrived_s=0.0,
            found_blocks=0,
        )
    ledger.next_event_s()
    for step in range(3):
        if ledger.enter(step * _STEP_S) != NONE:
            ledger.next_shed()
        _plan_step(ledger, defer=step == 0)
        ledger.step_facts()
        ledger.book(ledger.scale)
        ledger.believe(1.0)
    running = [int(row) for row in range(4) if ledger.facts(row).joined_step != NONE]
    ledger.withdraw_admission(running[0])
    ledger.preempt(running[1])
    ledger.apply(Allocation.static(plan))
    ledger.end(ledger.request_id(running[2]), FINISHED, 2)
    ledger.end(ledger.request_id(running[1]), CANCELLED, 1)
    ledger.close_interval(3 * _STEP_S)


def _plan_step(ledger: Ledger, *, defer: bool) -> None:
    ledger.set_blocks(_BLOCKS, [0] * len(ledger.guaranteed_blocks))
    op = ledger.begin()
    while op != DONE:
        if op == LOOK_UP and defer:
            ledger.defer(_STEP_S)
            defer = False
        elif op == LOOK_UP:
            row = ledger.op_row
            target_tokens = int(ledger.facts(row).prompt)
            ledger.found(row, target_tokens=target_tokens, blocks=0, idle_blocks=0)
        elif op == ADMIT:
            ledger.admit(ledger.op_row)
        op = ledger.next_op()
    ledger.grants()
