"""The retention queue in vLLM's block pool: counts stay true, and rule 7 says whose block goes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

pytest.importorskip("vllm", reason="orders vLLM's own blocks")

from trimtab.engine_bridge.vllm import virtual_time  # noqa: F401  isort: skip (no GPU)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.vllm.block_queue import RetentionQueue, retention_queue

BLOCKS = 40


def pool_and_queue() -> tuple[BlockPool, RetentionQueue]:
    plan = load_plan(None)
    pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)
    return pool, retention_queue(pool, plan, Allocation.static(plan))


class Holder:
    """A request that holds blocks of a tier."""

    def __init__(self, pool: BlockPool, queue: RetentionQueue, tier: int) -> None:
        self.pool, self.queue, self.tier = pool, queue, tier
        self.blocks: list[KVCacheBlock] = []

    def take(self, count: int) -> None:
        self.queue.takes(self.tier, [], False)
        self.blocks += self.pool.get_new_blocks(count)

    def share(self, blocks: list[KVCacheBlock]) -> None:
        self.queue.takes(self.tier, blocks, False)
        self.pool.touch(blocks)
        self.blocks += blocks

    def leave(self, now_s: float) -> None:
        self.queue.leaves(self.tier, self.blocks, now_s)
        self.pool.free_blocks(reversed(self.blocks))
        self.blocks = []


def check(pool: BlockPool, queue: RetentionQueue, holders: list[Holder], total: int) -> None:
    refs = Counter(block.block_id for holder in holders for block in holder.blocks)
    assert queue.num_free_blocks + sum(queue.held) == total
    assert sum(queue.held) == len(refs)
    pools: dict[int, set[int]] = {}
    for holder in holders:
        for block in holder.blocks:
            pools.setdefault(block.block_id, set()).add(queue._tier_pool[holder.tier])
    held = Counter(queue._charge[number] for number in refs)
    assert [held[n] for n in range(len(queue.held))] == queue.held
    for number, count in refs.items():
        assert pool.blocks[number].ref_cnt == count
        assert queue._charge[number] in pools[number]
    free = queue.get_all_free_blocks()
    assert len(free) == len({block.block_id for block in free}) == queue.num_free_blocks
    assert not {block.block_id for block in free} & set(refs)


@pytest.mark.parametrize("seed", range(10))
def test_counts_stay_true_whoever_shares_and_leaves(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pool, queue = pool_and_queue()
    total = queue.num_free_blocks
    holders: list[Holder] = []
    for step in range(300):
        turn = rng.random()
        if turn < 0.45 and queue.num_free_blocks >= 4:
            holders.append(Holder(pool, queue, int(rng.integers(4))))
            if holders[:-1] and rng.random() < 0.5:
                others = holders[int(rng.integers(len(holders) - 1))].blocks
                holders[-1].share(others[: int(rng.integers(len(others) + 1))])
            holders[-1].take(int(rng.integers(1, 5)))
        elif holders:
            holders.pop(int(rng.integers(len(holders)))).leave(float(step))
        check(pool, queue, holders, total)
    for holder in holders:
        holder.leave(300.0)
    check(pool, queue, [], total)
    assert queue.held == [0] * len(queue.held)
    assert not queue._foreign


def test_a_shared_block_is_charged_to_who_is_left() -> None:
    pool, queue = pool_and_queue()
    first, second = Holder(pool, queue, 0), Holder(pool, queue, 3)
    assert queue._tier_pool[0] != queue._tier_pool[3]
    first.take(3)
    second.share(list(first.blocks))
    assert queue.held[queue._tier_pool[0]] == 3
    first.leave(1.0)
    assert queue.held[queue._tier_pool[0]] == 0
    assert queue.held[queue._tier_pool[3]] == 3
    second.leave(2.0)
    assert sum(queue.held) == 0


def test_the_oldest_idle_block_of_a_class_goes_first() -> None:
    pool, queue = pool_and_queue()
    early, late = Holder(pool, queue, 3), Holder(pool, queue, 3)
    early.take(5)
    late.take(5)
    first, second = [b.block_id for b in early.blocks], [b.block_id for b in late.blocks]
    # As if their content could be found: what has none goes back to the empty ones.
    for block in early.blocks + late.blocks:
        block.ref_cnt -= 1
    queue.leaves(3, [], 1.0)
    queue.append_n(early.blocks)
    queue.leaves(3, [], 2.0)
    queue.append_n(late.blocks)
    rest = Holder(pool, queue, 3)
    rest.take(queue.empty_blocks)
    taken = Holder(pool, queue, 3)
    taken.take(5)
    assert sorted(block.block_id for block in taken.blocks) == sorted(first)
    taken.take(5)
    assert sorted(block.block_id for block in taken.blocks[5:]) == sorted(second)


def test_decodes_of_the_step_find_the_blocks_that_were_kept_for_them() -> None:
    pool, queue = pool_and_queue()
    idle = Holder(pool, queue, 3)
    idle.take(queue.num_free_blocks)
    for block in idle.blocks:
        block.ref_cnt -= 1
    queue.leaves(3, [], 1.0)
    queue.append_n(idle.blocks)
    queue.growing = (6, *queue.growing[1:])
    Holder(pool, queue, 3).take(2)
    assert queue.empty_blocks == 6
