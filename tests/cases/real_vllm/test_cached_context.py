"""Case 3 on the real engine: what a paying conversation has cached survives other tiers."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from tests.cases.real_vllm.serving import Engine, serve
from tests.cases.replaying import FINISHED, T0, T1, T2, T3, ttft_s
from tests.cases.test_cached_context import (
    BLOCKS,
    PUBLISHED,
    SPEC,
    Traffic,
    expect_context_kept,
    expect_loss_as_the_background_grows,
    reused_tokens,
)
from trimtab.engine_bridge.replay.engine import RuleSet
from trimtab.engine_bridge.vllm.block_queue import HELD


@pytest.mark.parametrize("rules", ["fcfs", "priority"])
def test_stock_rules_lose_the_context_as_the_background_grows(rules: RuleSet) -> None:
    expect_loss_as_the_background_grows(rules, serve)


@pytest.mark.parametrize(
    "traffic",
    [
        PUBLISHED,
        replace(PUBLISHED, turns=10, grow_tokens=100),
        replace(PUBLISHED, output_tokens=64, rate=10.0),
        replace(PUBLISHED, tier=T3),
        replace(PUBLISHED, tier=T1),
        replace(PUBLISHED, prompt_tokens=100, rate=50.0),
        replace(PUBLISHED, sessions=3, think_s=3.0, seed=5),
    ],
    ids=str,
)
def test_a_conversation_keeps_its_context_while_it_fits_its_pool(traffic: Traffic) -> None:
    expect_context_kept(traffic, serve)


def test_what_is_reused_is_what_the_replay_says() -> None:
    assert reused_tokens(PUBLISHED, serve=serve) == reused_tokens(PUBLISHED)


def test_a_pool_borrows_what_is_idle_and_gives_it_back() -> None:
    engine = Engine(Traffic(sessions=8, turns=10, rate=4.0, seed=6).trace(), SPEC)
    pool = engine.scheduler.kv_cache_manager.block_pool
    queue = pool.free_block_queue
    borrowed = given_back = False
    while engine.step() is not None:
        # A block is held by one pool, or free: the sums leave none over and none twice.
        assert sum(queue.held) + queue.num_free_blocks == BLOCKS
        assert sum(queue.guaranteed) == BLOCKS
        in_use = [block for block in pool.blocks if block.ref_cnt and not block.is_null]
        by_pool = [0] * len(queue.held)
        for block in in_use:
            assert queue._kind[block.block_id] == HELD
            by_pool[queue._charge[block.block_id]] += 1
        assert by_pool == queue.held
        borrowed |= queue.held[0] > queue.guaranteed[0]
        given_back |= borrowed and queue.held[0] <= queue.guaranteed[0]
    assert borrowed
    assert given_back
    q = engine.requests()
    assert (q["outcome"] == FINISHED).all()
    assert q["preemptions"][q["tier"] == T0].sum() == 0
    assert ttft_s(q)[q["tier"] == T2].max() < 10.0
