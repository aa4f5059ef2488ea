"""Case 3: what a paying conversation has cached must survive other tiers' traffic.

Reported for vLLM: with a small cache, low-priority requests push the cached prefixes of
high-priority ones out, because all free blocks are reused in one order of age.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.cases.replaying import (
    BLOCK_TOKENS,
    FINISHED,
    T0,
    T1,
    T2,
    T3,
    TIERS,
    Serve,
    engine_spec,
    ttft_s,
)
from tests.cases.replaying import replay as run
from tests.engine_bridge.replay.invariants import check_invariants
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.trace import NO_SESSION, Trace

BLOCKS = 512
SPEC = engine_spec(num_gpu_blocks=BLOCKS + 1)
"""512 blocks beside vLLM's null block."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """T0 sessions and background of another tier with unique prompts."""

    sessions: int = 4
    turns: int = 6
    grow_tokens: int = 200
    think_s: float = 1.0
    rate: float = 5.0
    tier: int = T2
    prompt_tokens: int = 1000
    output_tokens: int = 16
    seed: int = 3

    @property
    def fits_pool(self) -> bool:
        """Whether all that the sessions ever cache fits T0's pool."""
        last = self.grow_tokens * self.turns + 64
        return self.sessions * -(-last // BLOCK_TOKENS) <= 0.7 * BLOCKS

    def trace(self) -> Trace:
        rng = np.random.default_rng(self.seed)
        rows, next_id = [], 0
        for k in range(self.sessions):
            ids: list[int] = []
            for turn in range(self.turns):
                prompt = self.grow_tokens * (turn + 1)
                more = (prompt + 64) // BLOCK_TOKENS - len(ids)
                ids = [*ids, *range(next_id, next_id + more)]
                next_id += more
                rows.append((0.25 * k, T0, prompt, 64, k, turn, self.think_s * (turn > 0), ids))
        at_s, last_s = 0.0, self.turns * (self.think_s + 1.0)
        while self.rate and (at_s := at_s + rng.exponential(1 / self.rate)) < last_s:
            count = (self.prompt_tokens + self.output_tokens) // BLOCK_TOKENS
            ids = list(range(next_id, next_id + count))
            next_id += count
            size = (self.prompt_tokens, self.output_tokens)
            rows.append((at_s, self.tier, *size, NO_SESSION, 0, 0.0, ids))
        rows.sort(key=lambda row: row[0])
        columns = zip(*rows, strict=True)
        arrival_s, tier, prompts, outputs, session, turns, think_s, prefixes = columns
        lengths = [len(ids) for ids in prefixes]
        return Trace.build(
            arrival_s=arrival_s,
            tier=tier,
            prompt_tokens=prompts,
            output_tokens=outputs,
            session=np.array(session, np.int32),
            turn=np.array(turns, np.int32),
            think_s=np.array(think_s),
            tier_names=TIERS,
            prefix_offsets=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
            prefix_ids=np.array([i for ids in prefixes for i in ids], np.int32),
            prefix_block_tokens=np.full(len(rows), BLOCK_TOKENS, np.int32),
        )


PUBLISHED = Traffic()


def reused_tokens(traffic: Traffic, rules: RuleSet = "fair", serve: Serve = run) -> int:
    q = serve(traffic.trace(), SPEC, rules).requests
    assert (q["outcome"][q["tier"] == T0] == FINISHED).all()
    return int(q["cached_tokens"][q["tier"] == T0].sum())


@pytest.mark.parametrize("rules", ["fcfs", "priority"])
def test_stock_rules_lose_the_context_as_the_background_grows(rules: RuleSet) -> None:
    expect_loss_as_the_background_grows(rules, run)


def expect_loss_as_the_background_grows(rules: RuleSet, serve: Serve) -> None:
    alone, *by_background = (
        reused_tokens(replace(PUBLISHED, rate=rate), rules, serve) for rate in (0.0, 2.0, 5.0, 10.0)
    )
    by_rate = [reused / alone for reused in by_background]
    assert by_rate[0] >= by_rate[1] >= by_rate[2]
    assert by_rate[1] < 0.6
    assert by_rate[2] < 0.1


@pytest.mark.parametrize(
    "traffic",
    [
        PUBLISHED,
        replace(PUBLISHED, rate=2.0),
        replace(PUBLISHED, output_tokens=32),
        replace(PUBLISHED, output_tokens=64),
        replace(PUBLISHED, output_tokens=64, rate=10.0),
        replace(PUBLISHED, rate=10.0),
        replace(PUBLISHED, tier=T3),
        replace(PUBLISHED, tier=T1),
        replace(PUBLISHED, sessions=2, turns=12),
        replace(PUBLISHED, grow_tokens=400, turns=3, seed=4),
        replace(PUBLISHED, prompt_tokens=100, rate=50.0),
        replace(PUBLISHED, sessions=3, think_s=3.0, seed=5),
    ],
    ids=str,
)
def test_a_conversation_keeps_its_context_while_it_fits_its_pool(traffic: Traffic) -> None:
    expect_context_kept(traffic, run)


def expect_context_kept(traffic: Traffic, serve: Serve) -> None:
    assert traffic.fits_pool
    alone = reused_tokens(replace(traffic, rate=0.0), serve=serve)
    kept = reused_tokens(traffic, serve=serve)
    assert kept >= 0.9 * alone
    assert kept > reused_tokens(traffic, "fcfs", serve)


def test_batch_blocks_go_before_paid_ones() -> None:
    engine = ReplayEngine(PUBLISHED.trace(), load_plan(), SPEC)
    paid, lost, full = 0, 0, 0
    while not engine.finished:
        engine.advance(0.05)
        s = engine._state
        by_tier = [int(s.classes.blocks[s.classes.tier == t].sum()) for t in range(4)]
        if s.engine[0].empty_blocks == 0 and by_tier[T2] > 0:
            full += 1
            lost += max(0, paid - by_tier[T0] - int(s.pools[0].held))
        paid = by_tier[T0] + int(s.pools[0].held)
    assert full > 20
    assert lost <= 0.1 * 4 * 80


def test_a_pool_borrows_what_is_idle_and_gives_it_back() -> None:
    long = Traffic(sessions=8, turns=10, rate=4.0, seed=6)
    trace = long.trace()
    engine = ReplayEngine(trace, load_plan(), SPEC)
    borrowed, given_back = False, False
    while not engine.finished:
        telemetry = engine.advance(0.1)
        s = engine._state
        check_invariants(s)
        free = s.engine[0].empty_blocks + s.engine[0].cached_blocks
        assert free + s.pools.held.sum() == s.engine[0].total_blocks == BLOCKS
        assert s.pools.guaranteed.sum() == BLOCKS
        paid = telemetry.tiers[T0]
        borrowed |= paid.kv_blocks_used > paid.kv_blocks_guaranteed
        given_back |= borrowed and paid.kv_blocks_used <= paid.kv_blocks_guaranteed
    assert borrowed
    assert given_back
    q = engine.result().requests
    assert (q["outcome"] == FINISHED).all()
    assert q["preemptions"][q["tier"] == T0].sum() == 0
    assert ttft_s(q)[q["tier"] == T2].max() < 10.0
