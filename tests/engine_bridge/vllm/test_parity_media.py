"""Media in the replay against vLLM's scheduler and encoder cache, step by step.

`benchmarks/parity.py --media` compares hundreds of workloads.
"""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from tests.engine_bridge.replay.workloads import encoding_engine, prompts, small_engine
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine

STEPS = 300
SEEDS = {"fcfs": (3, 7, 9), "priority": (3, 7, 9), "fair": (7, 16, 18, 20)}
"""Caches too small for their items, items at the prompt's end, encoders of which nothing is known,
a request that gives way before its items are encoded."""


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
@pytest.mark.parametrize("rules", list(SEEDS))
def test_every_step_is_the_replay_s(parity: ModuleType, rules: str, caching: bool) -> None:
    done = [parity.compare((seed, STEPS, rules, caching), media=True) for seed in SEEDS[rules]]
    assert [one["first"] for one in done] == [None] * len(done)
    assert all(one["same"] == one["steps"] == STEPS for one in done)
    # Without preemptions and encoding the comparison would say little.
    assert sum(one["preemptions"] for one in done) > 0
    assert sum(one["encoded_items"] for one in done) > 100


def test_with_drafts_too(parity: ModuleType) -> None:
    done = parity.compare((3, STEPS, "fair", True), drafts=True, media=True)
    assert done["first"] is None
    assert done["same"] == STEPS


def test_a_victim_s_tokens_go_to_who_comes_behind(parity: ModuleType) -> None:
    """Priority: a prompt that had its chunk gives way to the next one's, in the same step."""
    trace = prompts(
        (0.0, 0, 410, 1, [(0, 400, 0)]),
        (0.0, 3, 717, 2, [(16, 400, 1), (416, 300, 2)]),
        (1e-6, 0, 700, 2, [(100, 50, 3)]),
        (1e-6, 0, 800, 2, []),
    )
    spec = encoding_engine(
        small_engine(blocks=101, tokens=1000, caching=False), budget_tokens=400, cache_tokens=2000
    )
    replay = ReplayEngine(trace, load_plan(None), spec, rules="priority", record_steps=True)
    vllm = parity.real_engine(trace, load_plan(None), spec, "priority")
    steps = []
    for _ in range(8):
        steps.append((replay.step(), replay.now_s))
        real = vllm.step()
        assert steps[-1] == ({} if real is None else real.tokens, vllm.now_s)
    assert [tokens for tokens, _ in steps[:3]] == [
        {0: 410, 1: 16},
        {1: 400, 2: 100, 3: 500},
        {2: 600, 3: 300},
    ]
    assert replay.result().requests["preemptions"][1] == 1
