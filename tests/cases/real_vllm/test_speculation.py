"""Case 8 on the real engine: drafts are verified where they pay, tier by tier (rule 9).

vLLM's own scheduler schedules, verifies and rolls back; which drafts are right is drawn by row and
place, so that it is the same whatever the length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from tests.cases.real_vllm.serving import Engine
from tests.cases.replaying import FINISHED, T0, T2, T3, Row, engine_spec, trace_of
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.drafted_step import draft_is_right
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.rules.draft_lengths import acceptance

MOST = 4
PROMPT = 256
SPEC = engine_spec(max_num_seqs=128)

Rate = Callable[[int, int], float]
"""Acceptance of a row's draft for the n-th place after its prompt."""


def plan_of(**draft_tokens: int) -> Plan:
    lengths = {f"tiers.{tier}.draft_tokens": n for tier, n in draft_tokens.items()}
    never = {f"tiers.{tier}.shed.mode": "never" for tier in ("T0", "T1", "T2", "T3")}
    return with_values(load_plan(), {**lengths, **never})


def speculating(
    rows: list[Row],
    rate: Rate,
    rules: RuleSet = "fair",
    draft_tokens: int = MOST,
    plan: Plan | None = None,
) -> Engine:
    def accepts(row: int, place: int) -> bool:
        return bool(draft_is_right(row, place, rate(row, place - PROMPT)))

    plan = plan or plan_of(T0=MOST, T1=MOST, T2=MOST, T3=MOST)
    return Engine(trace_of(rows), SPEC, rules, plan, draft_tokens=draft_tokens, accepts=accepts)


def lengths_of(engine: Engine) -> list[int]:
    return [int(length) for length in engine.scheduler._drafts.books.tiers.length]


def acceptance_of(engine: Engine, tier: int) -> float:
    return float(acceptance(engine.scheduler._drafts.books.tiers[tier]))


@cache
def tokens_per_s(batch: int, share: float, fixed: int | None, tier: int = T0) -> float:
    """Over the middle of a run of one tier; `fixed`: vLLM's own scheduler with that length."""
    rows = [Row(0.0, tier, PROMPT, 1500)] * batch
    rules: RuleSet = "fair" if fixed is None else "fcfs"
    engine = speculating(rows, lambda row, n: share, rules, MOST if fixed is None else fixed)
    at, given = [], []
    for _ in range(220):
        engine.step()
        at.append(engine.now_s)
        given.append(engine.generated.sum())
    # The chunks of the start are over, and so are the first choices.
    return float((given[-1] - given[120]) / (at[-1] - at[120]))


@pytest.mark.parametrize("share", [0.75, 0.4, 0.3])
@pytest.mark.parametrize("batch", [1, 8, 32, 64, 128])
def test_the_chosen_length_is_as_good_as_the_best_fixed_one(batch: int, share: float) -> None:
    fixed = [tokens_per_s(batch, share, k) for k in (0, 2, 4)]
    assert tokens_per_s(batch, share, None) >= 0.97 * max(fixed)


def test_drafts_can_be_a_loss_and_a_win() -> None:
    # Else the comparison above would say nothing.
    assert tokens_per_s(1, 0.75, 4) > 1.5 * tokens_per_s(1, 0.75, 0)
    assert tokens_per_s(128, 0.3, 4) < 0.97 * tokens_per_s(128, 0.3, 0)


def test_a_tier_without_drafts_in_its_plan_verifies_none() -> None:
    rows = [Row(0.0, tier, PROMPT, 100) for tier in (T0, T3)] * 4
    engine = speculating(rows, lambda row, n: 0.75, plan=plan_of(T0=MOST))
    while (step := engine.step()) is not None:
        for row, tokens in step.tokens.items():
            if row not in engine.chunks and engine.trace.tier[row] == T3:
                assert tokens == 1
    q = engine.requests()
    assert (q["outcome"] == FINISHED).all()
    assert (q["generated_tokens"][q["tier"] == T3] == 100).all()


@pytest.mark.parametrize("batch", [64, 128])
def test_a_drop_of_acceptance_is_followed_within_100_steps_without_flapping(batch: int) -> None:
    now = [0.75]
    engine = speculating([Row(0.0, T0, PROMPT, 2000)] * batch, lambda row, n: now[0])
    chosen = []
    for step in range(600):
        if step == 300:
            now[0] = 0.4
        engine.step()
        chosen.append(lengths_of(engine)[T0])
    steady = speculating([Row(0.0, T0, PROMPT, 2000)] * batch, lambda row, n: 0.4)
    for _ in range(300):
        steady.step()
    assert acceptance_of(engine, T0) == pytest.approx(0.4, abs=0.08)
    assert chosen[299] > chosen[400]
    # Contexts differ, and what one draft more is worth depends on them.
    assert abs(chosen[400] - lengths_of(steady)[T0]) <= 1
    assert sum(a != b for a, b in pairwise(chosen[100:300])) <= 1
    assert sum(a != b for a, b in pairwise(chosen[400:])) <= 1


def test_a_recovery_is_noticed_from_length_0() -> None:
    now = [0.1]
    engine = speculating([Row(0.0, T0, PROMPT, 2000)] * 128, lambda row, n: now[0])
    for _ in range(150):
        engine.step()
    assert lengths_of(engine)[T0] == 0
    now[0] = 0.9
    for _ in range(300):
        engine.step()
    assert lengths_of(engine)[T0] > 0


def test_one_tiers_acceptance_changes_nothing_for_another() -> None:
    def run(dropped: float) -> tuple[Engine, list[list[int]]]:
        rows = [Row(0.0, tier, PROMPT, 300) for tier in (T0, T2)] * 16

        def rate(row: int, n: int) -> float:
            return 0.75 if engine.trace.tier[row] == T0 or n < 60 else dropped

        engine = speculating(rows, rate)
        while engine.step() is not None:
            pass
        mine = [row for row in range(32) if engine.trace.tier[row] == T0]
        return engine, [list(engine.seen[row].output_token_ids) for row in mine]

    (same, outputs), (changed, others) = run(0.75), run(0.2)
    assert outputs == others
    assert acceptance_of(same, T2) > acceptance_of(changed, T2) + 0.3
    assert acceptance_of(same, T0) == pytest.approx(acceptance_of(changed, T0), abs=0.02)


def test_the_books_know_every_token_and_block_of_a_speculating_decode() -> None:
    rng = np.random.default_rng(8)
    rows = [
        Row(float(at), int(tier), PROMPT, int(out))
        for at, tier, out in zip(
            rng.uniform(0, 2, 60), rng.integers(0, 4, 60), rng.integers(20, 300, 60), strict=True
        )
    ]
    engine = speculating(rows, lambda row, n: 0.6)
    scheduler, seen = engine.scheduler, 0
    while engine.step() is not None:
        ledger = scheduler.ledger
        step = ledger.step
        for request in scheduler.running:
            facts = ledger.facts(ledger.row(request.request_id))
            if request.num_output_tokens == 0:
                continue
            behind = step - facts.sync_step
            assert facts.computed + behind == request.num_computed_tokens
            assert facts.generated + behind == request.num_output_tokens
            seen += 1
    assert seen > 1000
    q = engine.requests()
    assert (q["outcome"] == FINISHED).all()
    assert (q["preemptions"] == 0).all()
