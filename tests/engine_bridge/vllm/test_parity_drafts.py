"""Drafts in the replay against vLLM's scheduler, step by step: stock rules and rule 9.

`benchmarks/parity.py --drafts` compares hundreds of workloads.
"""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

STEPS = 300


@pytest.mark.parametrize("rules", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
def test_every_step_is_the_replay_s(parity: ModuleType, rules: str, caching: bool) -> None:
    seeds = (3, 8) if caching else (3, 131)
    done = [parity.compare((seed, STEPS, rules, caching), drafts=True) for seed in seeds]
    assert [one["first"] for one in done] == [None] * len(seeds)
    assert all(one["same"] == one["steps"] == STEPS for one in done)
    # Without preemptions the comparison would say little.
    assert sum(one["preemptions"] for one in done) > 0
