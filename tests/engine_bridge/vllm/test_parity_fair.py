"""The fair rules inside vLLM's scheduler against the replay, step by step, and no block leaks.

`benchmarks/parity.py` compares hundreds of workloads.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

pytest.importorskip("vllm", reason="runs the fair scheduler inside vLLM's own")


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
def test_every_step_is_the_replay_s(parity: ModuleType, caching: bool) -> None:
    seeds = (3, 8, 107, 318) if caching else (3, 7, 131)
    done = [parity.compare((seed, 300, "fair", caching)) for seed in seeds]
    assert [one["first"] for one in done] == [None] * len(seeds)
    assert all(one["same"] == one["steps"] == 300 for one in done)
    # Without preemptions the comparison would say little.
    assert sum(one["preemptions"] for one in done) > 0


def test_every_step_is_the_replay_s_where_the_waiting_age(parity: ModuleType) -> None:
    for seed in (3, 318):
        aged = parity.compare((seed, 300, "fair", True), aging=True)
        assert aged["first"] is None
        assert aged["same"] == aged["steps"] == 300
        # Otherwise it would be the comparison above once more.
        assert aged["end_s"] != parity.compare((seed, 300, "fair", True))["end_s"]


def test_every_step_is_the_replay_s_where_prefills_are_passed(parity: ModuleType) -> None:
    for seed in (8, 11):
        passing = parity.compare((seed, 300, "fair", True), chunks=True)
        assert passing["first"] is None
        assert passing["same"] == passing["steps"] == 300
        assert passing["end_s"] != parity.compare((seed, 300, "fair", True))["end_s"]


@pytest.mark.parametrize("seed", [60, 110], ids=["fixed-quotas", "two-makers"])
def test_rare_orders_of_blocks_are_the_replay_s(parity: ModuleType, seed: int) -> None:
    """Quotas that change with each emptied block; one content made as prompt and as answer."""
    done = parity.compare((seed, 500, "fair", True))
    assert done["first"] is None
    assert done["same"] == 500


@pytest.mark.parametrize("seed", range(3))
def test_no_block_leaks(parity: ModuleType, seed: int) -> None:
    rng = np.random.default_rng([seed, 7])
    spec = parity.engine(rng, caching=True)
    trace = parity.workload(rng, spec, requests=60)
    plan = parity.random_plan(rng)
    vllm = parity.real_engine(trace, plan, spec, "fair")
    blocks = vllm.scheduler.kv_cache_manager.block_pool.free_block_queue
    ledger, before = vllm.scheduler.ledger, vllm.free_blocks()
    while vllm.step() is not None:
        assert blocks.num_free_blocks + sum(blocks.held) == before
    assert vllm.free_blocks() == len(blocks.get_all_free_blocks()) == before
    assert blocks.held == [0] * len(plan.pools)
    assert not blocks.shared_between_pools
    assert all(ledger.row(f"{row:09d}") is None for row in range(len(trace)))
    state = ledger._state.engine[0]
    assert (state.running, state.prefilling, state.decoding, state.waiting) == (0, 0, 0, 0)
