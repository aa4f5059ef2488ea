"""The replay's stock rules against vLLM's own scheduler, step by step, on a few random workloads.

`benchmarks/parity.py` does the same on hundreds.
"""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("vllm", reason="compares with vLLM's own scheduler")


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no-caching"])
@pytest.mark.parametrize("rules", ["fcfs", "priority"])
def test_every_step_is_vllm_s(parity: ModuleType, rules: str, caching: bool) -> None:
    done = [parity.compare((seed, 300, rules, caching)) for seed in range(6)]
    assert [one["first"] for one in done] == [None] * 6
    assert all(one["same"] == one["steps"] == 300 for one in done)
    # Without preemptions the comparison would say little.
    assert sum(one["preemptions"] for one in done) > 0
