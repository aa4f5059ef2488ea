"""Whatever is proposed, what comes out is lawful, and a bad knob disturbs no other."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.engine_bridge.allocation import UNLIMITED, Allocation
from trimtab.engine_bridge.errors import AllocationError
from trimtab.engine_bridge.limits import LimitReason, project
from trimtab.engine_bridge.plan import Plan, load_plan, with_values

PLAN = load_plan(Path(__file__).parent / "plan" / "sample.yaml")
STATIC = Allocation.static(PLAN)
BOUNDS = PLAN.controller.bounds
KNOBS = tuple(f.name for f in fields(Allocation) if f.name != "version")
WHOLES = ("kv_fractions", "prefill_shares")

ANYTHING = (
    st.floats()
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 1e308, 5e-324, True, None, "7", UNLIMITED])
    | st.floats(0, 1)
)


def _proposals(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Allocation]:
    knobs = {
        knob: st.tuples(*[numbers] * len(static)) if isinstance(static, tuple) else numbers
        for knob, static in ((k, getattr(STATIC, k)) for k in KNOBS)
    }
    return st.builds(Allocation, **knobs, version=st.integers(0, 9))


GARBAGE = _proposals(ANYTHING)


def _entries(allocation: Allocation, knob: str) -> tuple[float, ...]:
    found = getattr(allocation, knob)
    return found if isinstance(found, tuple) else (found,)


def _assert_lawful(after: Allocation, before: Allocation) -> None:
    for knob in KNOBS:
        bounds = getattr(BOUNDS, knob)
        for value, previous in zip(_entries(after, knob), _entries(before, knob), strict=True):
            if bounds is None:
                assert value == previous
                continue
            assert type(value) is (int if bounds.integer else float)
            if knob in ("max_running", "max_num_seqs") and UNLIMITED in (value, previous):
                assert value == UNLIMITED or bounds.floor <= value <= bounds.ceiling
                continue
            assert bounds.floor <= value <= bounds.ceiling
            factor, change = (getattr(bounds, k, None) for k in ("max_change_factor", "max_change"))
            if factor is not None:
                assert previous / factor * (1 - 1e-12) <= value <= previous * factor * (1 + 1e-12)
            if change is not None:
                assert abs(value - previous) <= change + 1e-12
    for knob in WHOLES:
        assert abs(math.fsum(_entries(after, knob)) - 1) <= 1e-9


@given(st.lists(GARBAGE, min_size=1, max_size=4))
def test_any_sequence_of_garbage_stays_lawful(proposals: list[Allocation]) -> None:
    before = STATIC
    for proposed in proposals:
        after = project(proposed, before, PLAN).allocation
        _assert_lawful(after, before)
        before = after


@given(GARBAGE, GARBAGE)
def test_projection_is_idempotent(first: Allocation, second: Allocation) -> None:
    before = project(first, STATIC, PLAN).allocation
    after = project(second, before, PLAN).allocation
    again = project(after, before, PLAN)
    assert again.allocation == after
    assert again.limited == ()


@given(GARBAGE, st.sampled_from(KNOBS))
def test_a_bad_knob_never_disturbs_another(garbage: Allocation, knob: str) -> None:
    good = project(garbage, STATIC, PLAN).allocation
    bad = replace(good, **{knob: getattr(garbage, knob)})
    after = project(bad, STATIC, PLAN)
    for other in KNOBS:
        if other != knob:
            assert getattr(after.allocation, other) == getattr(good, other)
    assert {limited.knob for limited in after.limited} <= {knob}


@given(GARBAGE)
@settings(max_examples=50)
def test_an_unlawful_previous_allocation_counts_as_static(previous: Allocation) -> None:
    after = project(STATIC, previous, PLAN).allocation
    assert all(abs(math.fsum(_entries(after, knob)) - 1) <= 1e-9 for knob in WHOLES)
    for knob in KNOBS:
        bounds = getattr(BOUNDS, knob)
        for value in _entries(after, knob):
            assert bounds is None or value == UNLIMITED or bounds.floor <= value <= bounds.ceiling


@pytest.mark.parametrize("name", ["default", "published"])
def test_the_static_plan_is_a_fixed_point_bit_for_bit(name: str) -> None:
    plan = load_plan(name)
    static = Allocation.static(plan)
    projection = project(static, static, plan)
    assert projection.limited == ()
    for knob in KNOBS:
        before, after = _entries(static, knob), _entries(projection.allocation, knob)
        assert [math.copysign(1, v) for v in before] == [math.copysign(1, v) for v in after]
        assert before == after


@given(st.lists(GARBAGE, min_size=1, max_size=4))
def test_falling_back_to_the_whole_static_plan_takes_one_interval(
    proposals: list[Allocation],
) -> None:
    before = STATIC
    for proposal in proposals:
        before = project(proposal, before, PLAN).allocation
    back = project(replace(STATIC, version=7), before, PLAN)
    assert back.allocation == replace(STATIC, version=7)
    assert not back.limited


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=3))
def test_any_static_split_is_a_fixed_point(parts: list[int]) -> None:
    fractions = [part / sum(parts) for part in parts]
    pools = dict(zip(PLAN.pools, fractions, strict=True))
    wide = {"floor": 0.0, "ceiling": 1.0, "max_change": 0.05}
    plan = with_values(PLAN, {"pools": pools, "controller.bounds.kv_fractions": wide})
    static = Allocation.static(plan)
    assert project(static, static, plan).allocation == static


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "7", True])
def test_what_is_no_number_keeps_the_previous_value(bad: Any) -> None:
    before = replace(STATIC, weights=(700.0, 80.0, 6.0, 2.0), prefill_budget_tokens=3000)
    asked = replace(before, weights=(800.0, bad, 6.0, 2.0), prefill_budget_tokens=bad)
    projection = project(asked, before, PLAN)
    assert projection.allocation == before
    assert projection.reasons == (LimitReason.NOT_FINITE,)
    assert [limited.knob for limited in projection.limited] == ["weights", "prefill_budget_tokens"]


def test_numbers_of_numpy_are_numbers() -> None:
    asked = replace(STATIC, weights=tuple(np.float32([720, 90, 5, 1])), max_num_seqs=np.int64(64))
    projection = project(asked, STATIC, PLAN)
    assert projection.limited == ()
    assert projection.allocation.weights == STATIC.weights
    assert type(projection.allocation.max_num_seqs) is int


def test_each_limit_gives_its_reason() -> None:
    asked = replace(
        STATIC, weights=(1e9, 90.0, 0.0, 1.1), slack_fraction=0.9, kv_fractions=(7.0, 2.0, 1.0)
    )
    projection = project(asked, STATIC, PLAN)
    reasons = [(limited.knob, limited.reason) for limited in projection.limited]
    assert reasons == [
        ("weights", LimitReason.FLOOR),
        ("weights", LimitReason.CEILING),
        ("kv_fractions", LimitReason.SUM),
        ("slack_fraction", LimitReason.CHANGE),
    ]
    assert projection.allocation.weights == (1440.0, 90.0, 2.5, 1.1)
    assert projection.allocation.kv_fractions == pytest.approx((0.7, 0.2, 0.1))
    assert projection.allocation.slack_fraction == pytest.approx(0.5)


def test_fractions_move_toward_the_proposal_as_far_as_they_may() -> None:
    projection = project(replace(STATIC, kv_fractions=(0.5, 0.3, 0.2)), STATIC, PLAN)
    assert projection.allocation.kv_fractions == pytest.approx((0.65, 0.225, 0.125))
    assert projection.reasons == (LimitReason.CHANGE,)


def test_nothing_at_all_is_no_split() -> None:
    projection = project(replace(STATIC, kv_fractions=(0.0, 0.0, -1.0)), STATIC, PLAN)
    assert projection.allocation.kv_fractions == STATIC.kv_fractions
    assert LimitReason.SUM in projection.reasons


def test_a_closed_knob_keeps_its_static_value() -> None:
    projection = project(replace(STATIC, draft_tokens=(4, 0, 0, 0)), STATIC, PLAN)
    assert projection.allocation.draft_tokens == STATIC.draft_tokens
    assert projection.reasons == (LimitReason.CLOSED,)


def test_a_cap_follows_at_once_but_never_beyond_the_start_up_capacity() -> None:
    """Case: 64 running; cap 16, then 64; 128 is refused because the engine was started for 64."""
    applied = STATIC
    for asked, expected in ((16, 16), (64, 64), (128, 64), (10**12, 64), (16, 16), (100, 16)):
        projection = project(
            replace(applied, max_num_seqs=asked), applied, PLAN, capacity_max_num_seqs=64
        )
        applied = projection.allocation
        assert applied.max_num_seqs == expected
        refused = asked != expected
        assert projection.reasons == ((LimitReason.CAPACITY,) if refused else ())


def test_the_plan_states_the_capacity_where_the_engine_does_not() -> None:
    plan = with_values(PLAN, {"engine.max_num_seqs": 64})
    static = Allocation.static(plan)
    assert static.max_num_seqs == 64
    projection = project(replace(static, max_num_seqs=65), static, plan)
    assert projection.allocation == static
    assert projection.reasons == (LimitReason.CAPACITY,)


def test_an_unlimited_cap_stays_and_comes_back() -> None:
    capped = project(replace(STATIC, max_running=(8, 8, 8, 8)), STATIC, PLAN).allocation
    assert capped.max_running == (8, 8, 8, 8)
    assert project(STATIC, capped, PLAN).allocation.max_running == (UNLIMITED,) * 4


@pytest.mark.parametrize("knob", [k for k in KNOBS if isinstance(getattr(STATIC, k), tuple)])
def test_a_wrong_length_is_refused(knob: str) -> None:
    short = replace(STATIC, **{knob: getattr(STATIC, knob)[:-1]})
    with pytest.raises(AllocationError, match=rf"{knob}: .*a tuple with \d entries"):
        project(short, STATIC, PLAN)


def test_the_version_of_the_proposal_is_kept(default_plan: Plan) -> None:
    assert project(replace(STATIC, version=7), STATIC, default_plan).allocation.version == 7
