"""Case 8: drafts help a small batch and hurt a large one; each tier verifies what pays (rule 9).

The same figures on vLLM's own scheduler are in `real_vllm.test_speculation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from tests.cases.replaying import FINISHED, T0, T2, T3, Row, engine_spec, steps_of, trace_of
from trimtab.engine_bridge.draft_spec import DraftSpec
from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace

MOST = 4
PROMPT = 128
ACCEPTANCE = {T0: 0.75, T2: 0.40, T3: 0.30}
BATCHES = (1, 8, 32, 64, 128)
ALL_TIERS = dict.fromkeys(("T0", "T1", "T2", "T3"), MOST)


def plan_of(**draft_tokens: int) -> Plan:
    lengths = {f"tiers.{tier}.draft_tokens": n for tier, n in draft_tokens.items()}
    never = {f"tiers.{tier}.shed.mode": "never" for tier in ALL_TIERS}
    return with_values(load_plan(), {**lengths, **never})


def drafting(tokens: int) -> EngineSpec:
    spec = engine_spec(max_num_seqs=128)
    return spec if tokens == 0 else replace(spec, draft=DraftSpec(tokens=tokens))


def batch_of(tiers: list[int], acceptance: list[float], output: int = 500) -> Trace:
    trace = trace_of([Row(0.0, tier, PROMPT, output) for tier in tiers])
    return replace(trace, acceptance=np.array(acceptance))


def engine_of(trace: Trace, rules: RuleSet = "fair", tokens: int = MOST) -> ReplayEngine:
    return ReplayEngine(trace, plan_of(**ALL_TIERS), drafting(tokens), rules=rules)


def lengths_of(engine: ReplayEngine) -> list[int]:
    return [int(length) for length in engine._state.drafting.length]


def steps(engine: ReplayEngine, trace: Trace, count: int) -> Iterator[Telemetry]:
    for at, telemetry in enumerate(steps_of(engine, trace, np.inf)):
        yield telemetry
        if at + 1 == count:
            return


@cache
def tokens_per_s(tiers: tuple[int, ...], fixed: int | None, most: int = MOST) -> float:
    """Over the middle of a run; `fixed`: stock rules, which verify that many of everybody."""
    trace = batch_of(list(tiers), [ACCEPTANCE[tier] for tier in tiers], output=1600)
    engine = engine_of(trace, "fair" if fixed is None else "fcfs", most if fixed is None else fixed)
    # The chunks of the start are over by then, and so are the first choices.
    run = list(steps(engine, trace, 300))[150:]
    assert not any(tier.prefill_tokens for telemetry in run for tier in telemetry.tiers)
    tokens = sum(tier.decode_tokens for telemetry in run for tier in telemetry.tiers)
    return tokens / sum(telemetry.interval_s for telemetry in run)


@pytest.mark.parametrize("tier", [T0, T2, T3])
@pytest.mark.parametrize("batch", BATCHES)
def test_the_chosen_length_is_as_good_as_the_best_fixed_one(batch: int, tier: int) -> None:
    fixed = [tokens_per_s((tier,) * batch, k) for k in (0, 2, 4)]
    assert tokens_per_s((tier,) * batch, None) >= 0.97 * max(fixed)


@pytest.mark.parametrize("batch", [3, 30, 126])
def test_a_mixed_batch_is_as_good_as_under_the_best_length_for_all(batch: int) -> None:
    tiers = (T0, T2, T3) * (batch // 3)
    fixed = [tokens_per_s(tiers, k) for k in (0, 2, 4)]
    assert tokens_per_s(tiers, None) >= 0.97 * max(fixed)


def test_drafts_can_be_a_loss_and_a_win() -> None:
    # Else the comparisons above would say nothing.
    assert tokens_per_s((T0,), 4) > 1.5 * tokens_per_s((T0,), 0)
    assert tokens_per_s((T3,) * 128, 4) < 0.97 * tokens_per_s((T3,) * 128, 0)


def test_a_tier_without_drafts_in_its_plan_verifies_none() -> None:
    tiers = [T0, T3] * 4
    trace = batch_of(tiers, [ACCEPTANCE[tier] for tier in tiers], output=100)
    engine = ReplayEngine(trace, plan_of(T0=MOST), drafting(MOST))
    engine.run(interval_s=1.0)
    result = engine.result()
    assert result.drafts[T3].drafts == 0
    assert result.drafts[T3].steps == 4 * 99
    assert result.drafts[T0].drafts > 0
    q = result.requests
    assert (q["outcome"] == FINISHED).all()
    assert (q["generated_tokens"] == 100).all()


@pytest.mark.parametrize("batch", [64, 128])
def test_a_drop_of_acceptance_is_followed_within_100_steps_without_flapping(batch: int) -> None:
    def run(held: int | None) -> tuple[list[int], float]:
        """Lengths by step, and tokens a second from 100 steps after the drop on."""
        trace = batch_of([T0] * batch, [0.75] * batch, output=2000)
        engine, chosen = engine_of(trace), []
        tokens, seconds = 0, 0.0
        for step, telemetry in enumerate(steps(engine, trace, 600)):
            chosen.append(lengths_of(engine)[T0])
            if step == 299:
                engine._state.req.acceptance[:] = 0.40
            if step == 399 and held is not None:
                engine._state.drafting.length[T0] = held
                engine._state.drafting.since[T0] = -1000
            if step >= 400:
                tokens += telemetry.tiers[T0].decode_tokens
                seconds += telemetry.interval_s
        return chosen, tokens / seconds

    chosen, rate = run(None)
    assert chosen[299] > chosen[400]
    assert rate >= 0.97 * max(run(held)[1] for held in range(MOST + 1))
    assert sum(a != b for a, b in pairwise(chosen[100:300])) <= 1
    assert sum(a != b for a, b in pairwise(chosen[400:])) <= 1


def test_a_recovery_is_noticed_from_length_0() -> None:
    trace = batch_of([T0] * 128, [0.1] * 128, output=2000)
    engine = engine_of(trace)
    for _ in steps(engine, trace, 150):
        pass
    assert lengths_of(engine)[T0] == 0
    engine._state.req.acceptance[:] = 0.9
    for _ in steps(engine, trace, 300):
        pass
    assert lengths_of(engine)[T0] > 0


def test_one_tiers_acceptance_changes_nothing_for_another() -> None:
    def run(other: float) -> ReplayEngine:
        tiers = [T0, T2] * 16
        trace = batch_of(tiers, [0.75 if tier == T0 else other for tier in tiers], output=300)
        engine = engine_of(trace)
        engine.run(interval_s=1.0)
        return engine

    same, changed = (run(other).result() for other in (0.75, 0.2))
    mine = same.requests["tier"] == T0
    assert (same.requests["generated_tokens"][mine] == 300).all()
    assert (changed.requests["generated_tokens"][mine] == 300).all()
    share = [result.drafts[T0].accepted / result.drafts[T0].drafts for result in (same, changed)]
    assert share[0] == pytest.approx(share[1], abs=0.02)
    assert changed.drafts[T2].accepted < 0.5 * same.drafts[T2].accepted
