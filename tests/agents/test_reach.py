"""Reach: garbage ends inside, what lies inside is untouched, and sums stay."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.agents.guard_settings import DEFAULT_REACH
from trimtab.agents.reach import between, distance, within_reach
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.plan import load_plan

PLAN = load_plan()
STATIC = Allocation.static(PLAN)
INSIDE = replace(
    STATIC,
    weights=(9000.0, 90.0, 5.0, 1.0),
    kv_fractions=(0.65, 0.22, 0.13),
    prefill_budget_tokens=6000,
    slack_fraction=0.6,
)
_numbers = st.floats(-1e300, 1e300)


@st.composite
def garbage(draw: st.DrawFn) -> Allocation:
    """Finite numbers of the right shape, and nothing else right."""
    return replace(
        STATIC,
        weights=tuple(draw(_numbers) for _ in STATIC.weights),
        kv_fractions=tuple(draw(_numbers) for _ in STATIC.kv_fractions),
        prefill_budget_tokens=draw(st.integers(-(10**30), 10**30)),
        prefill_shares=tuple(draw(_numbers) for _ in STATIC.prefill_shares),
        slack_fraction=draw(_numbers),
        shed_at=tuple(draw(_numbers) for _ in STATIC.shed_at),
        max_num_seqs=draw(st.integers(1, 2**31)),
    )


@given(garbage())
def test_garbage_ends_inside_the_reach(proposed: Allocation) -> None:
    held = within_reach(proposed, STATIC, DEFAULT_REACH)
    for knob in ("weights", "kv_fractions", "prefill_shares", "shed_at"):
        for value, home in zip(getattr(held, knob), getattr(STATIC, knob), strict=True):
            assert abs(math.log(value / home)) <= DEFAULT_REACH[knob] + 1e-9
    assert math.fsum(held.kv_fractions) == pytest.approx(1.0, abs=1e-9)
    assert math.fsum(held.prefill_shares) == pytest.approx(1.0, abs=1e-9)
    assert held.slack_fraction == pytest.approx(STATIC.slack_fraction, abs=0.3 + 1e-9)
    assert isinstance(held.prefill_budget_tokens, int)
    assert held.max_num_seqs == STATIC.max_num_seqs
    assert 0.0 <= distance(held, STATIC, DEFAULT_REACH) <= 1.0


@pytest.mark.parametrize("proposed", [STATIC, INSIDE])
def test_what_lies_inside_comes_back_bit_for_bit(proposed: Allocation) -> None:
    assert within_reach(proposed, STATIC, DEFAULT_REACH) == proposed


def test_between_begins_at_static_and_ends_at_the_proposal() -> None:
    assert between(STATIC, INSIDE, 0.0) == STATIC
    assert between(STATIC, INSIDE, 1.0) == INSIDE
    half = between(STATIC, INSIDE, 0.5)
    assert half.weights[0] == pytest.approx(math.sqrt(STATIC.weights[0] * INSIDE.weights[0]))
    assert half.weights[2:] == STATIC.weights[2:]
    assert half.kv_fractions == pytest.approx((0.675, 0.21, 0.115))
    assert math.fsum(half.kv_fractions) == pytest.approx(1.0)


def test_distance_is_nothing_at_static_only_and_grows_on_the_way() -> None:
    steps = [distance(between(STATIC, INSIDE, i / 8), STATIC, DEFAULT_REACH) for i in range(9)]
    assert steps[0] == 0.0
    assert steps == sorted(set(steps))
    assert distance(replace(STATIC, version=7), STATIC, DEFAULT_REACH) == 0.0
    assert distance(replace(STATIC, max_num_seqs=3), STATIC, DEFAULT_REACH) > 0.0
