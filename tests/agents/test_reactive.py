"""The reactive policy's control law, one clause at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.agents.reactive import ReactivePolicy
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import with_values

STATIC = Allocation.static(PLAN)


@pytest.fixture
def policy() -> ReactivePolicy:
    made = ReactivePolicy()
    made.reset(PLAN, 0)
    return made


def seen(tier: int, **figures: float):
    tiers = [tier_telemetry() for _ in PLAN.tiers]
    tiers[tier] = tier_telemetry(**figures)
    return telemetry(PLAN, tiers)


def test_tiers_give_way_to_a_missing_tier_of_more_value(policy: ReactivePolicy) -> None:
    act = policy.act(seen(1, attainment=0.5, attainment_samples=200))
    assert act.weights[:2] == STATIC.weights[:2]
    assert act.weights[2] < STATIC.weights[2]
    assert act.weights[3] < STATIC.weights[3]


def test_few_samples_move_less_than_many(policy: ReactivePolicy) -> None:
    few = policy.act(seen(1, attainment=0.5, attainment_samples=1)).weights[2]
    policy.reset(PLAN, 0)
    many = policy.act(seen(1, attainment=0.5, attainment_samples=500)).weights[2]
    assert STATIC.weights[2] > few > many


def test_weights_return_to_the_static_ones_when_the_errors_are_gone(policy: ReactivePolicy) -> None:
    act = policy.act(seen(1, attainment=0.0, attainment_samples=500))
    for _ in range(200):
        fine = seen(1, attainment=1.0, attainment_samples=500)
        act = policy.act(replace(fine, applied=act))
    assert act.weights == STATIC.weights


def test_a_best_effort_tier_that_misses_moves_no_weight(policy: ReactivePolicy) -> None:
    act = policy.act(seen(3, attainment=0.0, attainment_samples=500))
    assert act.weights == STATIC.weights


def test_the_budget_backs_off_when_a_protected_tier_is_paced_too_slowly(
    policy: ReactivePolicy,
) -> None:
    act = policy.act(seen(0, tpot_ms_p99=80.0))
    assert act.prefill_budget_tokens == int(0.75 * STATIC.prefill_budget_tokens)


def test_a_low_tier_paced_too_slowly_moves_no_budget(policy: ReactivePolicy) -> None:
    act = policy.act(seen(3, tpot_ms_p99=800.0))
    assert act.prefill_budget_tokens == STATIC.prefill_budget_tokens


def test_the_budget_grows_by_steps_while_first_tokens_are_late(policy: ReactivePolicy) -> None:
    step = round(STATIC.prefill_budget_tokens / 16)
    late = seen(0, ttft_ms_p99=2000.0)
    act = policy.act(late)
    assert act.prefill_budget_tokens == STATIC.prefill_budget_tokens + step
    act = policy.act(replace(late, applied=act))
    assert act.prefill_budget_tokens == STATIC.prefill_budget_tokens + 2 * step


def test_the_budget_grows_to_half_over_the_static_one_and_no_further(
    policy: ReactivePolicy,
) -> None:
    act = STATIC
    for _ in range(30):
        act = policy.act(replace(seen(0, ttft_ms_p99=2000.0), applied=act))
    assert act.prefill_budget_tokens == int(1.5 * STATIC.prefill_budget_tokens)


def test_backing_off_wins_over_growing(policy: ReactivePolicy) -> None:
    act = policy.act(seen(0, ttft_ms_p99=2000.0, tpot_ms_p99=80.0))
    assert act.prefill_budget_tokens < STATIC.prefill_budget_tokens


@pytest.mark.parametrize("start_tokens", [1000, 4000])
def test_a_budget_that_moved_comes_back_to_the_static_one(
    policy: ReactivePolicy, start_tokens: int
) -> None:
    act = replace(STATIC, prefill_budget_tokens=start_tokens)
    fine = seen(0, ttft_ms_p99=100.0, tpot_ms_p99=10.0)
    for _ in range(40):
        act = policy.act(replace(fine, applied=act))
    assert act.prefill_budget_tokens == STATIC.prefill_budget_tokens


def test_kv_moves_only_when_memory_is_short(policy: ReactivePolicy) -> None:
    missing = seen(2, attainment=0.0, attainment_samples=500)
    assert policy.act(missing).kv_fractions == STATIC.kv_fractions
    act = policy.act(replace(missing, kv_use_fraction=0.97))
    assert act.kv_fractions[1] > STATIC.kv_fractions[1]
    assert act.kv_fractions[0] < STATIC.kv_fractions[0]
    assert sum(act.kv_fractions) == pytest.approx(1.0)


def test_kv_goes_home_when_memory_is_no_longer_short(policy: ReactivePolicy) -> None:
    act = replace(STATIC, kv_fractions=(0.6, 0.3, 0.1))
    calm = seen(0, attainment=1.0, attainment_samples=50)
    for _ in range(100):
        act = policy.act(replace(calm, applied=act))
    assert act.kv_fractions == pytest.approx(STATIC.kv_fractions, abs=1e-3)


def test_holds_where_it_was_when_data_stop(policy: ReactivePolicy) -> None:
    act = policy.act(seen(0, tpot_ms_p99=80.0, attainment=0.2, attainment_samples=100))
    held = policy.act(replace(telemetry(PLAN), applied=act))
    assert held == act


def test_stays_inside_tight_bounds() -> None:
    frozen = with_values(PLAN, {"controller.bounds.weights.max_change_factor": 1.0})
    policy = ReactivePolicy()
    policy.reset(frozen, 0)
    act = policy.act(seen(0, attainment=0.0, attainment_samples=500))
    assert act.weights == STATIC.weights
