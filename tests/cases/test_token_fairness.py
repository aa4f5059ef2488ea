"""Case 6: what is shared fairly is the engine's time, not the number of requests.

Tenant A sends prompts of 8,000 tokens with answers of 1,000, tenant B 128 and 64. Stock rules, or a
round robin over requests, give A almost everything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.cases.replaying import CANCELLED, T0, T1, Columns, Row, engine_spec, replay, trace_of
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.replay.report import ReplayResult

A, B = 0, 1
END_S, EVERY_S, WINDOW_S = 600.0, 5.0, 60.0
WARM_UP_S = 60.0
"""A's first answers take this long. Until they end, the service that A is still owed is what its
requests in flight have yet to use: the constant of the bound, paid once."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Both tenants always have requests waiting, from `b_from_s` on."""

    tiers: tuple[int, int] = (T0, T0)
    b_from_s: float = 0.0
    first_of_a: int = 60
    b_cancels: float = 0.0
    b_rate: float = 130.0
    seed: int = 6

    def rows(self) -> list[Row]:
        rng = np.random.default_rng(self.seed)
        rows = [Row(0.0, self.tiers[A], 8000, 1000, A)] * self.first_of_a
        for at in rng.uniform(0.0, END_S, int(2.0 * END_S)):
            rows.append(Row(float(at), self.tiers[A], 8000, 1000, A))
        span_s = END_S - self.b_from_s
        rows += [Row(self.b_from_s + 1e-3, self.tiers[B], 128, 64, B)] * 200
        for at in rng.uniform(self.b_from_s, END_S, int(self.b_rate * span_s)):
            gone = float(rng.uniform(0.5, 60.0)) if rng.random() < self.b_cancels else np.inf
            rows.append(Row(float(at), self.tiers[B], 128, 64, B, gone))
        return rows


@dataclass(frozen=True)
class Service:
    """Engine time that each tenant has used up to each of `at_s`, ms, shape (times, 2)."""

    at_s: np.ndarray
    used_ms: np.ndarray
    waiting: np.ndarray
    """(times, 2): whether requests of the tenant wait."""
    result: ReplayResult

    def ratios(self, weights: tuple[float, float], from_s: float = WARM_UP_S) -> np.ndarray:
        """Weighted service of A over B's in every window in which both wait all the time."""
        n = round(WINDOW_S / EVERY_S)
        both: np.ndarray = np.asarray(self.waiting.all(axis=1))
        got = (self.used_ms[n:] - self.used_ms[:-n]) / np.array(weights)
        steady = np.array([both[k : k + n + 1].all() for k in range(len(got))])
        steady &= self.at_s[:-n] >= from_s
        found: np.ndarray = got[steady, A] / got[steady, B]
        return found

    def gaps_ms(self, weights: tuple[float, float], from_s: float = 0.0) -> np.ndarray:
        """Difference of weighted service since `from_s`, at every time after it."""
        later = self.at_s >= from_s
        got = self.used_ms[later] / np.array(weights)
        gaps: np.ndarray = np.abs((got - got[0]) @ np.array([1.0, -1.0]))
        return gaps


def serve(traffic: Traffic, rules: RuleSet = "fair", plan: Plan | None = None) -> Service:
    trace = trace_of(traffic.rows(), tenant_names=("A", "B"))
    engine = ReplayEngine(trace, plan or load_plan(), engine_spec(), rules=rules)
    at_s, used, waits = [], [], []
    while engine.now_s < END_S:
        engine.advance(EVERY_S)
        req = engine._state.req
        at_s.append(engine.now_s)
        by_tenant = [trace.tenant == A, trace.tenant == B]
        used.append([float(req.service_ms[mine].sum()) for mine in by_tenant])
        waits.append([bool((req.status[mine] == 1).any()) for mine in by_tenant])
    return Service(np.array(at_s), np.array(used), np.array(waits), engine.result())


def tokens(q: Columns) -> tuple[float, float]:
    """VTC's measure of service, 1 x input + 2 x output, of requests that have started."""
    started = ~np.isnan(q["first_token_s"])
    measure = started * q["prompt_tokens"] + 2 * q["generated_tokens"]
    return float(measure[q["tenant"] == A].sum()), float(measure[q["tenant"] == B].sum())


def three_to_one(between: str) -> tuple[Traffic, Plan]:
    """Weights 3 : 1 between two tiers, or shares 3 : 1 between two tenants of one."""
    if between == "tiers":
        weights = {"tiers.T0.weight": 3.0, "tiers.T1.weight": 1.0, "tiers.T1.shed.mode": "never"}
        return Traffic(tiers=(T0, T1)), with_values(load_plan(), weights)
    shares = {name: {"tier": "T0", "share": s} for name, s in (("A", 3.0), ("B", 1.0))}
    return Traffic(), with_values(load_plan(), {"tenants": shares})


def test_stock_rules_give_the_long_contexts_almost_everything() -> None:
    # Both send as many requests: an equal number each is what a round robin would give, too.
    rows = Traffic(b_rate=2.0).rows()
    trace = trace_of(rows, tenant_names=("A", "B"))
    q = replay(trace, engine_spec(), "fcfs", until_s=END_S).requests
    a, b = tokens(q)
    assert a / (a + b) > 0.9


@pytest.mark.parametrize("seed", [6, 7])
def test_equal_shares_get_equal_time_in_every_minute(seed: int) -> None:
    got = serve(Traffic(seed=seed))
    ratios = got.ratios((1.0, 1.0))
    assert len(ratios) > 75
    assert np.abs(ratios - 1.0).max() <= 0.05
    assert got.result.engine_busy_s >= 0.98 * got.result.end_s


def test_weighted_tokens_keep_one_ratio_too() -> None:
    # Engine time prices a token by what it costs, VTC by kind: the ratio is another, but as steady.
    traffic = Traffic()
    half = [serve(traffic).used_ms[k] for k in (60, -1)]
    assert half[1][A] / half[1][B] == pytest.approx(half[0][A] / half[0][B], rel=0.05)


@pytest.mark.parametrize("between", ["tiers", "tenants"])
def test_service_follows_weights_of_three_to_one(between: str) -> None:
    traffic, plan = three_to_one(between)
    got = serve(traffic, plan=plan)
    assert got.waiting[2:].all()
    ratios = got.ratios((3.0, 1.0), from_s=120.0)
    assert len(ratios) > 60
    assert np.abs(ratios - 1.0).max() <= 0.05
    first, last = got.used_ms[24], got.used_ms[-1]
    assert (last - first)[A] / (last - first)[B] == pytest.approx(3.0, rel=0.02)


@pytest.mark.parametrize("between", ["equal", "tiers", "tenants"])
def test_the_difference_of_service_does_not_grow_with_time(between: str) -> None:
    if between == "equal":
        traffic, plan, weights = Traffic(), load_plan(), (1.0, 1.0)
    else:
        (traffic, plan), weights = three_to_one(between), (3.0, 1.0)
    got = serve(traffic, plan=plan)
    gaps = got.gaps_ms(weights)
    half = len(gaps) // 2
    assert gaps[half:].max() <= gaps[:half].max() + 1000.0
    assert gaps.max() <= 8_000.0
    if between == "tiers":
        assert got.result.service_gap_ms <= got.result.service_gap_bound_ms


def test_a_returning_tenant_gets_its_share_and_no_credit() -> None:
    traffic = Traffic(b_from_s=300.0)
    got = serve(traffic)
    alone = serve(Traffic(b_from_s=END_S - 1.0))
    before = got.at_s <= 300.0
    # A uses all of the engine while B is away.
    assert got.used_ms[before][-1, A] >= 0.98 * 300e3
    assert got.used_ms[before][-1, A] == pytest.approx(alone.used_ms[before][-1, A], rel=0.02)
    ratios = got.ratios((1.0, 1.0), from_s=300.0 + WARM_UP_S)
    assert np.abs(ratios - 1.0).max() <= 0.07
    # Not more than half of the time since it is back, but for what one batch holds.
    back = got.used_ms[-1] - got.used_ms[before][-1]
    assert back[B] <= 0.5 * 300e3 + 4_000.0


def test_a_hundred_requests_queued_at_once_buy_nothing() -> None:
    crowd, usual = serve(Traffic(first_of_a=160)), serve(Traffic())
    assert np.abs(crowd.ratios((1.0, 1.0)) - 1.0).max() <= 0.05
    assert crowd.used_ms[-1, A] == pytest.approx(usual.used_ms[-1, A], rel=0.01)


def test_cancelled_requests_are_charged_what_they_used() -> None:
    got = serve(Traffic(b_cancels=0.5, b_rate=220.0))
    q = got.result.requests
    gone = q["outcome"] == CANCELLED
    assert gone.sum() > 20_000
    assert np.abs(got.ratios((1.0, 1.0)) - 1.0).max() <= 0.05


def test_an_idle_share_is_used_as_well_as_under_fcfs() -> None:
    rows = [Row(0.0, T0, 8000, 1000, A)] * 400
    fair, stock = (
        tokens(replay(trace_of(rows), engine_spec(), rules, until_s=120.0).requests)[A]
        for rules in ("fair", "fcfs")
    )
    assert fair >= 0.98 * stock
