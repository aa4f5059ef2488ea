"""The fair queue's accounts: shares, no banked credit, refunds, order; without an engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.property.fair_server import (
    PURE,
    Level,
    Windows,
    build_level,
    dispatch,
    enqueue,
    withdraw,
)
from trimtab.engine_bridge.rules import fair_queue

Cost = Callable[[int], float]


class Shop:
    """One tier's tenants before a server that serves one request at a time, costs known or not."""

    def __init__(
        self, shares: list[float], windows: Windows = PURE, *, requests: int = 8000
    ) -> None:
        self.level: Level = build_level([1.0], [shares], requests, windows)
        self.served_ms = np.zeros(len(shares))
        self.order: list[int] = []
        self._rows = 0

    def ask(self, tenant: int, *, ms: float, really: float | None = None) -> int:
        """Queue a request estimated at `ms` that really takes `really`; returns its row."""
        row, self._rows = self._rows, self._rows + 1
        r = self.level.req[row]
        r.tenant, r.estimate_ms, r.prefill_estimate_ms = tenant, ms, ms
        r.predicted = round((ms if really is None else really) * 1e3)
        r.arrived_s = float(row)
        enqueue(self.level, row, tenant)
        return row

    def start(self, *, feasible: bool = False) -> int:
        """Dispatch the next request."""
        engine, tiers, tenants, req, lists, active = self.level
        if feasible:
            row = fair_queue.next_by_feasibility(engine, tiers, tenants, req, lists, active, 0, 64)
        else:
            row = fair_queue.next_by_finish(engine, tiers, tenants, req, lists, active, 0)
        dispatch(self.level, row)
        self.order.append(row)
        return row

    def waiting(self) -> list[int]:
        """Rows that have not started."""
        return [row for row in range(self._rows) if self.level.req[row].list >= 0]

    def start_ms(self, row: int) -> float:
        """Virtual start of a waiting request among the tenants."""
        tenant = self.level.tenants[int(self.level.req[row].tenant)]
        return float(fair_queue.queued_start_ms(tenant, self.level.req, self.level.lists, row))

    def use(self, row: int, ms: float) -> None:
        """Book service."""
        tenant = int(self.level.req[row].tenant)
        fair_queue.use(self.level.tiers, self.level.tenants, self.level.req, row, tenant, ms, 1)
        self.served_ms[tenant] += ms

    def end(self, row: int) -> None:
        """Settle the account of a request that is over."""
        tenant = int(self.level.req[row].tenant)
        fair_queue.settle(self.level.tiers, self.level.tenants, self.level.req, row, tenant, 1)

    def serve(self, budget_ms: float, refill: Callable[[], None] | None = None) -> None:
        """Serve whole requests until `budget_ms` are used up or nobody waits."""
        limit = self.served_ms.sum() + budget_ms
        while self.served_ms.sum() < limit:
            if refill is not None:
                refill()
            if self.level.tiers[0].active_count == 0:
                return
            row = self.start()
            self.use(row, self.level.req[row].predicted * 1e-3)
            self.end(row)

    def keep(self, tenant: int, *, ms: float, really: float | None = None) -> None:
        """See to it that the tenant still has a request waiting when one of its own starts."""
        while self.level.lists[tenant].count < 2:
            self.ask(tenant, ms=ms, really=really)


@pytest.mark.parametrize("shares", [[1.0, 1.0], [3.0, 1.0]])
@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
def test_shares_hold_between_long_and_short_requests_whatever_is_estimated(
    shares: list[float], wrong: float
) -> None:
    shop = Shop(shares)

    def refill() -> None:
        shop.keep(0, ms=2400.0 * wrong, really=2400.0)
        shop.keep(1, ms=30.0 / wrong, really=30.0)

    before = shop.served_ms.copy()
    for _ in range(3):
        shop.serve(60_000.0, refill)
        served, before = shop.served_ms - before, shop.served_ms.copy()
        largest_estimate = max(2400.0, 2400.0 * wrong)
        normalised = served / np.array(shares)
        assert abs(normalised[0] - normalised[1]) <= 2.0 * largest_estimate + 4 * 2400.0


def test_a_tenant_that_returns_from_idling_gets_its_share_and_no_more() -> None:
    shop = Shop([1.0, 1.0])
    shop.serve(300_000.0, lambda: shop.keep(0, ms=500.0))
    before = shop.served_ms.copy()

    def refill() -> None:
        shop.keep(0, ms=500.0)
        shop.keep(1, ms=20.0)

    shop.serve(20_000.0, refill)
    gained = shop.served_ms - before
    assert abs(gained[0] - gained[1]) <= 1000.0


def test_a_hundred_requests_queued_at_once_do_not_hold_up_another_tenant() -> None:
    shop = Shop([1.0, 1.0])
    for _ in range(100):
        shop.ask(0, ms=500.0)
    shop.serve(2_000.0)
    mine = shop.ask(1, ms=20.0)
    assert shop.start() == mine


def test_an_idle_tenant_s_share_goes_to_the_others() -> None:
    shop = Shop([1.0, 9.0])
    shop.serve(10_000.0, lambda: shop.keep(0, ms=100.0))
    assert shop.served_ms[0] == 10_000.0


def test_a_cancelled_request_pays_for_what_it_used_only() -> None:
    shop = Shop([2.0, 1.0])
    row = shop.ask(0, ms=900.0)
    shop.ask(0, ms=10.0)
    shop.start()
    shop.use(row, 40.0)
    assert fair_queue.tenant_start_ms(shop.level.tenants[0]) == pytest.approx(450.0)
    shop.end(row)
    assert fair_queue.tenant_start_ms(shop.level.tenants[0]) == pytest.approx(20.0)
    assert shop.level.tenants[0].outstanding_ms == pytest.approx(0.0)
    assert shop.level.tiers[0].outstanding_ms == pytest.approx(0.0)


def test_half_of_the_requests_cancelled_leaves_the_shares_as_they_are() -> None:
    shop = Shop([1.0, 1.0])
    number = 0

    def refill() -> None:
        nonlocal number
        number += 1
        shop.keep(0, ms=400.0)
        # Every second one gives up after a tenth of what was expected.
        shop.keep(1, ms=50.0, really=5.0 if number % 2 else 50.0)

    shop.serve(60_000.0, refill)
    assert abs(shop.served_ms[0] - shop.served_ms[1]) <= 2.0 * 400.0 + 2.0 * 50.0


def test_a_withdrawn_request_charges_nothing_and_those_behind_it_move_up() -> None:
    shop = Shop([1.0, 1.0])
    first, second, third = (shop.ask(0, ms=ms) for ms in (100.0, 300.0, 50.0))
    before = fair_queue.tenant_start_ms(shop.level.tenants[0])
    withdraw(shop.level, second)
    assert fair_queue.tenant_start_ms(shop.level.tenants[0]) == before
    assert shop.level.req[third].position_ms - shop.level.req[first].position_ms == 100.0
    withdraw(shop.level, first)
    withdraw(shop.level, third)
    assert shop.level.tiers[0].active_count == 0
    assert shop.level.tenants[0].account_ms == 0.0


def test_a_demoted_request_is_charged_once_when_it_runs() -> None:
    shop = Shop([1.0])
    row = shop.ask(0, ms=100.0)
    other = shop.ask(0, ms=70.0)
    withdraw(shop.level, row)
    enqueue(shop.level, row, 0)
    assert [shop.start(), shop.start()] == [other, row]
    assert shop.level.tenants[0].outstanding_ms == 170.0


def test_equal_virtual_finishes_go_by_arrival() -> None:
    shop = Shop([1.0, 1.0, 1.0])
    rows = [shop.ask(tenant, ms=10.0) for tenant in (2, 0, 1)]
    assert [shop.start() for _ in rows] == rows


def test_a_raised_estimate_moves_the_order_and_is_given_back() -> None:
    shop = Shop([1.0, 1.0])
    row = shop.ask(0, ms=10.0)
    shop.start()
    shop.use(row, 10.0)
    level = shop.level
    fair_queue.expect(level.tiers, level.tenants, level.req, row, 0, 30.0, 1)
    assert fair_queue.tenant_start_ms(level.tenants[0]) == pytest.approx(40.0)
    shop.end(row)
    assert fair_queue.tenant_start_ms(level.tenants[0]) == pytest.approx(10.0)


def test_window_zero_never_leaves_a_waiting_tenant_without_a_choice() -> None:
    """Positions far from zero must not round the least start past the window's edge."""
    rng = np.random.default_rng(4)
    shop = Shop([0.37, 1.7])
    for _ in range(2000):
        shop.keep(0, ms=float(rng.uniform(0.1, 9.0)))
        shop.keep(1, ms=float(rng.uniform(0.1, 9.0)))
        row = shop.start(feasible=True)
        shop.use(row, float(rng.uniform(0.1, 9.0)))
        shop.end(row)


def test_within_the_window_the_shortest_feasible_prefill_goes_first() -> None:
    shop = Shop([1.0, 1.0], Windows(feasible_ms=410.0))
    shop.level.tiers.ttft_s[:] = 1e9
    long, short = shop.ask(0, ms=400.0), shop.ask(0, ms=20.0)
    outside = shop.ask(0, ms=1.0)
    assert shop.start(feasible=True) == short
    # The head keeps its place while others pass.
    assert fair_queue.tenant_start_ms(shop.level.tenants[0]) == pytest.approx(0.0)
    assert shop.start(feasible=True) == long
    assert shop.start(feasible=True) == outside
    assert shop.level.tenants[0].bypassed_ms == 0.0
    assert shop.level.tenants[0].outstanding_ms == pytest.approx(421.0)


def aging_shop(shares: list[float], windows: Windows, *, full_after_s: float = 10.0) -> Shop:
    """Tenants whose requests gain the whole window while they wait so long."""
    shop = Shop(shares, windows)
    shop.level.engine.lead_per_s[:] = 1.0 / full_after_s
    shop.level.engine.due_every[:] = 1
    return shop


def ask_at(shop: Shop, arrived_s: float, tenant: int, *, ms: float) -> int:
    """Queue a request that arrives then; it is never too late, unless a TTFT is set."""
    shop.level.engine.now_s[:] = arrived_s
    row = shop.ask(tenant, ms=ms)
    shop.level.req[row].arrived_s = arrived_s
    return row


def test_a_lead_grows_with_the_wait_up_to_the_window() -> None:
    shop = aging_shop([1.0, 1.0], Windows(tenants_ms=80.0))
    engine, _, tenants, req, _, _ = shop.level
    tenants[1].bonus = 0.5
    usual, interactive = (ask_at(shop, 5.0, tenant, ms=9.0) for tenant in (0, 1))

    def leads(now_s: float, window_ms: float) -> list[float]:
        engine.now_s[:] = now_s
        rows = ((tenants[0], req[usual]), (tenants[1], req[interactive]))
        return [fair_queue.lead_ms(engine, tenant, r, window_ms) for tenant, r in rows]

    assert leads(5.0, 80.0) == [0.0, 40.0]
    assert leads(7.5, 80.0) == [20.0, 60.0]
    assert leads(1e6, 80.0) == [80.0, 80.0]
    assert leads(1e6, 0.0) == [0.0, 0.0]
    req[usual].demoted = 1
    assert leads(1e6, 80.0) == [0.0, 80.0]


@pytest.mark.parametrize("window_ms", [30.0, 70.0])
def test_newcomers_pass_a_waiting_request_only_as_far_as_the_window(window_ms: float) -> None:
    """Ever new tenants with short requests would pass a long one for ever."""
    shop = aging_shop([1.0] * 200, Windows(tenants_ms=window_ms))
    long = ask_at(shop, 0.0, 0, ms=50.0)
    for newcomer in range(1, 100):
        shop.ask(newcomer, ms=1.0)
        shop.level.engine.now_s[:] = shop.level.req[newcomer].arrived_s = float(newcomer)
        row = shop.start()
        shop.use(row, 1.0)
        shop.end(row)
    passed = shop.order.index(long) if long in shop.order else None
    # 49 ms have to be gained: 70 ms of lead do it at 7 s, the seventh to come; 30 ms never.
    assert passed == (6 if window_ms == 70.0 else None)


def test_what_others_gained_by_ageing_is_not_charged_to_who_returns() -> None:
    shop = aging_shop([1.0, 1.0], Windows(tenants_ms=100.0))
    for _ in range(3):
        ask_at(shop, 0.0, 0, ms=40.0)
    shop.level.engine.now_s[:] = 10.0
    for _ in range(3):
        row = shop.start()
        shop.use(row, 40.0)
        shop.end(row)
    # The last start was at 80 ms with a lead of 100 ms; level time has not moved with it.
    ask_at(shop, 10.0, 1, ms=40.0)
    assert fair_queue.tenant_start_ms(shop.level.tenants[1]) == 0.0


def test_who_is_due_goes_before_the_feasible_now_and_then() -> None:
    shop = aging_shop([1.0] * 9, Windows(feasible_ms=500.0, tenants_ms=500.0), full_after_s=4.0)
    shop.level.engine.due_every[:] = 3
    shop.level.tiers.ttft_s[:] = 1.0
    late = [ask_at(shop, 0.0, tenant, ms=2000.0) for tenant in (0, 1)]
    for tenant in range(2, 9):
        ask_at(shop, 4.0, tenant, ms=1.0)
    for _ in range(7):
        shop.start(feasible=True)
    # Two starts are the others', the third is for the one that waits longest.
    assert [shop.order.index(row) for row in late] == [2, 5]


def test_a_late_request_is_passed_for_good_where_nobody_ages() -> None:
    shop = Shop([1.0] * 9, Windows(feasible_ms=500.0))
    shop.level.tiers.ttft_s[:] = 1.0
    late = ask_at(shop, 0.0, 0, ms=2000.0)
    for tenant in range(1, 9):
        ask_at(shop, 4.0, tenant, ms=1.0)
    for _ in range(8):
        shop.start(feasible=True)
    assert late not in shop.order


@pytest.mark.parametrize("window_ms", [40.0, 60.0])
def test_a_lead_brings_a_request_into_rule_14_s_choice(window_ms: float) -> None:
    """Outside the window of rule 14 it may go when its lead brings it before the least start."""
    shop = aging_shop([1.0, 1.0], Windows(tenants_ms=window_ms), full_after_s=1.0)
    first = ask_at(shop, 0.0, 0, ms=50.0)
    behind = ask_at(shop, 0.0, 0, ms=1.0)
    assert shop.start(feasible=True) == first
    newcomer = ask_at(shop, 1.0, 1, ms=5.0)
    shop.level.tiers.ttft_s[:] = 10.0
    # It starts at 50 ms, the newcomer at 0: 60 ms of lead are enough, 40 are not.
    order = [shop.start(feasible=True) for _ in range(2)]
    assert order == ([behind, newcomer] if window_ms == 60.0 else [newcomer, behind])


def test_a_tier_that_was_held_back_banks_no_credit() -> None:
    level = build_level([1.0, 1.0], [[1.0], [1.0]], 50)
    for row in range(40):
        level.req[row].tenant = row % 2
        level.req[row].estimate_ms = 10.0
        enqueue(level, row, row % 2)
    for row in range(0, 40, 2):
        dispatch(level, row)
    fair_queue.lift_tier(level.engine, level.tiers, 1, 10.0)
    assert fair_queue.tier_start_ms(level.tiers[1]) == 180.0
    fair_queue.lift_tier(level.engine, level.tiers, 1, 0.0)
    assert fair_queue.tier_start_ms(level.tiers[1]) == level.engine[0].tier_v == 190.0


@pytest.mark.parametrize("factor", [0.0, 1.0, 5.0])
def test_who_can_be_in_time_is_passed_by_no_more_than_its_own_length(factor: float) -> None:
    """docs/fairness.md: a start before it is later than its own by `factor` prefills at most."""
    passed = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        windows = Windows(feasible_ms=40.0, prefill_factor=factor)
        shop = Shop([1.0, 1.0, 3.0], windows, requests=60)
        shop.level.tiers.ttft_s[:] = 30.0
        for number in range(60):
            shop.ask(int(rng.choice(3, p=(0.8, 0.1, 0.1))), ms=float(rng.uniform(1.0, 30.0)))
            shop.level.engine.now_s[:] = float(number)
            if rng.random() < 0.4:
                continue
            starts = {row: shop.start_ms(row) for row in shop.waiting()}
            edge = min(starts.values()) + windows.feasible_ms
            row = shop.start(feasible=True)
            for other, start in starts.items():
                r = shop.level.req[other]
                in_time = number + r.prefill_estimate_ms * 1e-3 <= r.arrived_s + 30.0
                if other == row or start > edge or not in_time:
                    continue
                most = factor * r.prefill_estimate_ms / shop.level.tenants[r.tenant].share
                assert starts[row] <= start + most + 1e-9
                passed += starts[row] > start
    # Somebody is passed, or the bound would say nothing.
    assert (passed > 0) == (factor > 0.0)
