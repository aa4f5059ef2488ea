"""The split of an engine's cost: it adds up, it is fair, and it cannot be gamed by reserving."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.training.economics.costs import Meter, split_cost

USD_PER_S = 3.0 / 3600


def meter(
    *,
    worked_s: list[float],
    service_ms: list[list[float]],
    held: list[list[float]],
    guaranteed: list[list[float]],
    shares: list[float] = (0.55, 0.3, 0.1, 0.05),
    pools: tuple[int, ...] = (0, 0, 1, 2),
    length_s: float = 2.0,
) -> Meter:
    return Meter(
        length_s=np.full(len(worked_s), length_s),
        worked_s=np.array(worked_s),
        service_ms=np.array(service_ms, np.float64),
        held_blocks=np.array(held, np.float64),
        guaranteed_blocks=np.array(guaranteed, np.float64),
        shares=np.array([shares] * len(worked_s), np.float64),
        pool_of_tier=np.array(pools, np.int64),
    )


SOME = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))


@st.composite
def meters(draw: st.DrawFn, *, whole: bool = False) -> Meter:
    """Any meter: tiers and pools with nothing, intervals of no length, nothing at all.

    With `whole` the guarantees sum to 1,000 blocks and no more are held, as in an engine.
    """
    pools = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, pools - 1), max_size=3))
    pool_of_tier = [*range(pools), *extra]
    n, tiers = draw(st.integers(1, 6)), len(pool_of_tier)

    def table(columns: int) -> np.ndarray:
        rows = [[draw(SOME) for _ in range(columns)] for _ in range(n)]
        return np.array(rows)

    length = np.array([draw(SOME) for _ in range(n)])
    held, guaranteed = table(pools), table(pools)
    if whole:
        parts = [np.array([draw(st.floats(0.01, 1)) for _ in range(pools)]) for _ in range(n)]
        guaranteed = np.array([1000 * part / part.sum() for part in parts])
        most = held.sum(axis=1, keepdims=True)
        fill = np.array([[draw(st.floats(0, 1))] for _ in range(n)])
        held = 1000 * fill * held / np.where(most > 0, most, 1)
    return Meter(
        length_s=length,
        worked_s=np.array([draw(SOME) for _ in range(n)]),
        service_ms=table(tiers),
        held_blocks=held,
        guaranteed_blocks=guaranteed,
        shares=table(tiers),
        pool_of_tier=np.array(pool_of_tier, np.int64),
    )


@given(meters())
def test_the_tiers_costs_sum_to_the_engines(used: Meter) -> None:
    split = split_cost(used, USD_PER_S)
    cost = USD_PER_S * float(used.length_s.sum())
    assert float(split.total_usd.sum()) == pytest.approx(cost, rel=1e-9, abs=1e-15)
    for part in (split.compute_usd, split.kv_held_usd, split.idle_reserve_usd):
        assert np.all(part >= 0)


def test_an_engine_without_traffic_is_paid_by_who_reserves_it() -> None:
    used = meter(worked_s=[0], service_ms=[[0] * 4], held=[[0, 0, 0]], guaranteed=[[700, 200, 100]])
    split = split_cost(used, 1.0)
    assert split.idle_reserve_usd == pytest.approx(
        2.0 * np.array([0.7 * 0.55 / 0.85, 0.7 * 0.3 / 0.85, 0.2, 0.1])
    )
    assert not split.compute_usd.any()


def test_an_engine_that_works_all_the_time_is_paid_by_service() -> None:
    used = meter(
        worked_s=[2], service_ms=[[600, 0, 1400, 0]], held=[[5, 5, 0]], guaranteed=[[70, 20, 10]]
    )
    assert split_cost(used, 1.0).total_usd == pytest.approx([0.6, 0, 1.4, 0])


def test_a_lone_batch_request_at_night_does_not_pay_for_the_reserve_of_others() -> None:
    # 0.2 s of 2 s are worked; the fixed part of its steps is spare time like any other.
    used = meter(
        worked_s=[0.2], service_ms=[[0, 0, 1900, 0]], held=[[0, 10, 0]], guaranteed=[[70, 20, 10]]
    )
    split = split_cost(used, 1.0)
    assert split.compute_usd == pytest.approx([0, 0, 0.2, 0])
    assert split.kv_held_usd == pytest.approx([0, 0, 1.8 * 0.1, 0])
    assert split.idle_reserve_usd[[2, 3]] == pytest.approx([1.8 * 0.1, 1.8 * 0.1])
    assert split.idle_reserve_usd[:2].sum() == pytest.approx(1.8 * 0.7)


def test_who_borrows_pays_for_what_is_lent_to_it() -> None:
    # The batch pool holds all 100 blocks: nothing is idle, whoever it is kept for.
    used = meter(
        worked_s=[0], service_ms=[[0, 0, 5, 0]], held=[[0, 100, 0]], guaranteed=[[70, 20, 10]]
    )
    split = split_cost(used, 1.0)
    assert split.total_usd == pytest.approx([0, 0, 2, 0])
    assert not split.idle_reserve_usd.any()


def test_lent_blocks_relieve_the_lenders_in_proportion_to_what_lies_idle() -> None:
    used = meter(
        worked_s=[0], service_ms=[[0, 0, 5, 0]], held=[[0, 60, 0]], guaranteed=[[70, 20, 10]]
    )
    idle = split_cost(used, 1.0).idle_reserve_usd
    # 40 of the 80 idle blocks are lent.
    assert idle[:2].sum() == pytest.approx(2 * 0.35)
    assert idle[3] == pytest.approx(2 * 0.05)


def test_a_tier_that_was_never_served_pays_for_its_reserve() -> None:
    used = meter(
        worked_s=[1], service_ms=[[1000, 500, 500, 0]], held=[[70, 20, 0]],
        guaranteed=[[70, 20, 10]],
    )  # fmt: skip
    split = split_cost(used, 1.0)
    assert split.total_usd[3] == pytest.approx(0.1)
    assert split.compute_usd[3] == 0


def test_a_shared_guarantee_is_paid_by_shares_however_much_each_tier_sends() -> None:
    used = meter(
        worked_s=[1], service_ms=[[0, 900, 0, 0]], held=[[30, 0, 0]], guaranteed=[[70, 20, 10]]
    )
    split = split_cost(used, 1.0)
    assert split.idle_reserve_usd[:2] == pytest.approx([0.4 * 0.55 / 0.85, 0.4 * 0.3 / 0.85])
    assert split.kv_held_usd == pytest.approx([0, 0.3, 0, 0])


@given(meters(whole=True), st.data())
def test_reserving_more_never_costs_less_nor_the_others_together_more(
    used: Meter, data: st.DataObject
) -> None:
    pools = used.held_blocks.shape[1]
    ours, theirs = (data.draw(st.integers(0, pools - 1)) for _ in range(2))
    part = data.draw(st.floats(0, 1))
    moved = used.guaranteed_blocks.copy()
    blocks = part * moved[:, theirs]
    moved[:, theirs] -= blocks
    moved[:, ours] += blocks
    before = split_cost(used, 1.0).total_usd
    after = split_cost(replace(used, guaranteed_blocks=moved), 1.0).total_usd
    slack = 1e-9 * float(used.length_s.sum())
    mine = used.pool_of_tier == ours
    if ours != theirs:
        assert after[mine].sum() >= before[mine].sum() - slack
        assert after[~mine].sum() <= before[~mine].sum() + slack


def test_who_lends_less_than_before_keeps_more_of_its_own_reserve_idle() -> None:
    held, worked = [[500, 0, 0]], [0]
    lent = meter(worked_s=worked, service_ms=[[0] * 4], held=held, guaranteed=[[250, 500, 250]])
    own = meter(worked_s=worked, service_ms=[[0] * 4], held=held, guaranteed=[[500, 250, 250]])
    before, after = split_cost(lent, 1.0).total_usd, split_cost(own, 1.0).total_usd
    # The first pool reserves what it had borrowed: two thirds of that had been the second's.
    assert before[2:] == pytest.approx([2 * 0.5 * 2 / 3, 2 * 0.5 / 3])
    assert after[2:] == pytest.approx([2 * 0.25, 2 * 0.25])
    assert after[2:].sum() == pytest.approx(before[2:].sum())


@given(meters(whole=True), st.data())
def test_filling_ones_reserve_with_anything_never_lowers_the_pools_bill(
    used: Meter, data: st.DataObject
) -> None:
    pools = used.held_blocks.shape[1]
    ours = data.draw(st.integers(0, pools - 1))
    free = 1000 - used.held_blocks.sum(axis=1)
    held = used.held_blocks.copy()
    held[:, ours] += data.draw(st.floats(0, 1)) * np.maximum(free, 0)
    mine = used.pool_of_tier == ours
    before = split_cost(used, 1.0).total_usd[mine].sum()
    after = split_cost(replace(used, held_blocks=held), 1.0).total_usd[mine].sum()
    assert after >= before - 1e-9 * float(used.length_s.sum())


@given(meters(whole=True), st.data())
def test_more_work_never_lowers_a_tiers_bill(used: Meter, data: st.DataObject) -> None:
    tier = data.draw(st.integers(0, len(used.pool_of_tier) - 1))
    # One tier works, and the whole service is worked time: then a second more is its own.
    busy_s = np.minimum(used.length_s, used.worked_s)
    service = np.zeros_like(used.service_ms)
    service[:, tier] = 1e3 * busy_s / 2
    less = replace(used, worked_s=busy_s / 2, service_ms=service)
    more = replace(used, worked_s=busy_s, service_ms=2 * service)
    slack = 1e-9 * float(used.length_s.sum())
    assert split_cost(more, 1.0).total_usd[tier] >= split_cost(less, 1.0).total_usd[tier] - slack
