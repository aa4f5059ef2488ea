"""Media in the replay against vLLM's scheduler and encoder cache, step by step.

`benchmarks/parity.py --media` compares hundreds of workloads.
"""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

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
