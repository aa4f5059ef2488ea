"""Case 2 on the real engine: no wait at the batch cap behind a lower tier, and no ping-pong."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from tests.cases.real_vllm.serving import serve
from tests.cases.replaying import T0, T1, T2, T3
from tests.cases.test_batch_cap import (
    ARRIVES_S,
    expect_a_wait_for_the_first_to_finish,
    expect_few_displaced,
    expect_no_victim_in_vain,
    expect_one_victim,
    expect_the_cheapest_victim,
    newcomer,
    run,
)

RUNNING_TOKENS = 400
"""Output of those who run; long enough to be running when the newcomer comes."""


@pytest.mark.parametrize("cap", [8, 32])
def test_stock_priority_waits_for_the_first_low_request_to_finish(cap: int) -> None:
    q = run([newcomer(T0)], cap=cap, rules="priority", serve=serve)
    expect_a_wait_for_the_first_to_finish(q)


@pytest.mark.parametrize("tiers", [(T0, T3), (T0, T1), (T1, T2), (T2, T3)])
@pytest.mark.parametrize("cap", [1, 8, 32, 64])
def test_a_higher_tier_is_admitted_within_two_steps_for_one_victim(
    cap: int, tiers: tuple[int, int]
) -> None:
    high, low = tiers
    q = run([newcomer(high)], cap=cap, tier=low, output=RUNNING_TOKENS, serve=serve)
    expect_one_victim(q, high)


def test_the_victim_is_the_one_with_least_to_compute_again() -> None:
    expect_the_cheapest_victim(serve)


@pytest.mark.parametrize("tier", [T0, T3])
def test_nobody_gives_way_to_an_equal(tier: int) -> None:
    newcomers = [newcomer(tier, ARRIVES_S + 0.1 * k) for k in range(8)]
    q = run(newcomers, tier=tier, output=RUNNING_TOKENS, serve=serve)
    assert q["preemptions"].sum() == 0


def test_no_victim_is_taken_in_vain() -> None:
    expect_no_victim_in_vain(serve)


@pytest.mark.parametrize(("every_s", "count"), [(0.5, 12), (0.02, 100)], ids=["few", "many"])
def test_a_stream_of_newcomers_displaces_nobody_again_and_again(every_s: float, count: int) -> None:
    newcomers = [newcomer(T0, ARRIVES_S + every_s * k) for k in range(count)]
    q = run(newcomers, output=2 * RUNNING_TOKENS, serve=serve)
    expect_few_displaced(q, every_s)
