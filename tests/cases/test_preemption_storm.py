"""Case 5: a cache that is too small makes requests give way, but not again and again.

Reported: an engine that preempted 7.4 % of 19,801 requests, 95 % of them once, at most four times;
and a simulator of it that failed 173,622 times to find blocks for one request and stood still.
Some 42,000 blocks would be held here at most, so 26,000 are 60 % of the peak demand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from tests.cases.replaying import (
    FINISHED,
    REFUSED,
    SHED,
    T0,
    T1,
    T2,
    T3,
    Columns,
    Row,
    Serve,
    Served,
    engine_spec,
    trace_of,
    ttft_s,
)
from tests.cases.replaying import replay as run
from trimtab.engine_bridge.plan import load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet

POISON_TOKENS, POISON_EVERY_S = 18_000, 20.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One variant of the case."""

    requests: int = 20_000
    rate: float = 20.0
    blocks: int = 26_000
    mix: tuple[float, ...] = (0.3, 0.2, 0.3, 0.2)
    seed: int = 5
    poison: bool = False

    def rows(self) -> list[Row]:
        rng = np.random.default_rng(self.seed)
        arrival = np.cumsum(rng.exponential(1 / self.rate, self.requests))
        tier = rng.choice(4, self.requests, p=self.mix)
        prompt = rng.integers(512, 4097, self.requests)
        output = rng.integers(128, 1025, self.requests)
        columns = (arrival.tolist(), tier.tolist(), prompt.tolist(), output.tolist())
        rows = [Row(*row) for row in zip(*columns, strict=True)]
        if self.poison:
            times = np.arange(10.0, arrival[-1] - POISON_EVERY_S, POISON_EVERY_S)
            rows += [Row(float(at), T0, POISON_TOKENS, 200) for at in times]
        return rows

    def run(self, rules: RuleSet = "fair", serve: Serve = run) -> Served:
        return serve(trace_of(self.rows()), engine_spec(num_gpu_blocks=self.blocks), rules)


PUBLISHED = Traffic()
TIGHT = Traffic(requests=6000, rate=8.0, blocks=15_600)
VARIANTS = [
    PUBLISHED,
    replace(PUBLISHED, poison=True),
    TIGHT,
    replace(TIGHT, poison=True),
    Traffic(requests=4000, rate=6.0, blocks=11_700, seed=6),
    Traffic(requests=4000, rate=6.0, blocks=11_700, seed=7, poison=True),
    Traffic(requests=4000, rate=8.0, blocks=12_000, mix=(0.7, 0.1, 0.1, 0.1), seed=8),
    Traffic(requests=4000, rate=8.0, blocks=12_000, mix=(0.05, 0.05, 0.6, 0.3), seed=9),
    Traffic(requests=3000, rate=8.0, blocks=12_000, mix=(0.0, 0.0, 1.0, 0.0), seed=10),
    Traffic(requests=3000, rate=8.0, blocks=12_000, mix=(1.0, 0.0, 0.0, 0.0), seed=11),
]


def recomputed_fraction(q: Columns) -> float:
    served = np.sum(q["prompt_tokens"] + q["generated_tokens"])
    return float(q["recomputed_tokens"].sum() / served)


def since_poison_s(q: Columns) -> np.ndarray:
    """Time from the last long prompt to each arrival, seconds."""
    at = q["arrival_s"][q["prompt_tokens"] == POISON_TOKENS]
    place = np.searchsorted(at, q["arrival_s"], side="right") - 1
    since: np.ndarray = np.where(place < 0, np.inf, q["arrival_s"] - at[place])
    return since


def test_stock_rules_preempt_as_the_instrumented_engine_did() -> None:
    q: Columns = PUBLISHED.run("fcfs").requests
    assert (q["outcome"] == FINISHED).all()
    times = q["preemptions"]
    assert 0.05 < np.mean(times > 0) < 0.25
    assert np.mean(times[times > 0] == 1) > 0.85
    assert times.max() <= 4
    # And a paying request waits as long as all others.
    assert np.median(ttft_s(q)[q["tier"] == T0]) > 600.0


@pytest.mark.parametrize("traffic", VARIANTS, ids=str)
def test_everybody_ends_and_nobody_is_tossed_about(traffic: Traffic) -> None:
    expect_everybody_ends(traffic, run)


def expect_everybody_ends(traffic: Traffic, serve: Serve) -> None:
    result = traffic.run(serve=serve)
    q = result.requests
    refusing = [tier.shed.mode == "refuse" for tier in load_plan().tiers.values()]
    may_shed = np.array(refusing)[q["tier"]]
    assert ((q["outcome"] == FINISHED) | ((q["outcome"] == SHED) & may_shed)).all()
    assert not may_shed[q["tier"] == T0].any()
    assert q["preemptions"].max() <= 5
    assert recomputed_fraction(q) <= 0.25
    assert result.engine_busy_s >= 0.97 * (result.end_s - q["arrival_s"][0]) or traffic.rate < 8.0


@pytest.mark.parametrize("traffic", [PUBLISHED, TIGHT], ids=["published", "tight"])
def test_paying_requests_do_not_wait_behind_an_overload(traffic: Traffic) -> None:
    q = traffic.run().requests
    wait = ttft_s(q)
    assert np.median(wait[q["tier"] == T0]) < 0.8
    assert np.quantile(wait[q["tier"] == T0], 0.99) < 8.0


@pytest.mark.parametrize("rate", [5.0, 6.0, 8.0])
def test_first_tokens_are_quick_again_five_seconds_after_a_long_prompt(rate: float) -> None:
    late_s = []
    # A p99 of one drawing hangs on a few requests: at 8 requests/s from 0.4 to 1.7 s.
    for seed in range(12, 24):
        traffic = Traffic(requests=4000, rate=rate, blocks=15_600, seed=seed, poison=True)
        q = traffic.run().requests
        since = since_poison_s(q)
        paying = (q["tier"] == T0) & (q["prompt_tokens"] != POISON_TOKENS) & np.isfinite(since)
        late_s.append(np.quantile(ttft_s(q)[paying & (since >= 5.0)], 0.99))
    target_ms = load_plan().tiers["T0"].targets.ttft_ms
    assert target_ms is not None
    assert np.median(late_s) * 1e3 <= target_ms


@pytest.mark.parametrize("tier", [T0, T1, T2, T3])
def test_a_request_larger_than_the_cache_is_refused_at_once(tier: int) -> None:
    expect_a_refusal_at_once(tier, run)


def expect_a_refusal_at_once(tier: int, serve: Serve) -> None:
    rows = [Row(0.2 * k, T1, 1000, 200) for k in range(100)]
    rows.append(Row(5.0, tier, 16 * 2000, 10))
    q = serve(trace_of(rows), engine_spec(num_gpu_blocks=2000)).requests
    large = q["prompt_tokens"] == 32_000
    assert q["outcome"][large] == REFUSED
    assert (q["outcome"][~large] == FINISHED).all()
    assert q["preemptions"].sum() == 0


def test_a_request_of_almost_the_whole_cache_is_served_in_the_end() -> None:
    for tier in (T0, T1, T2):
        rows = [Row(0.5 * k, T1, 1000, 200) for k in range(200)]
        rows.append(Row(5.0, tier, 16 * 1980, 10))
        result = run(trace_of(rows), engine_spec(num_gpu_blocks=2000))
        assert (result.requests["outcome"] == FINISHED).all()


def test_backing_off_never_idles_the_engine_while_others_can_run() -> None:
    # A long back-off makes the fault visible if it is there.
    plan = with_values(load_plan(), {"backoff.per_waiting_ms": 1000.0, "backoff.max_ms": 5000.0})
    rows = replace(TIGHT, requests=2000, mix=(0.2, 0.1, 0.4, 0.3)).rows()
    engine = ReplayEngine(trace_of(rows), plan, engine_spec(num_gpu_blocks=TIGHT.blocks))
    idle_s = 0.0
    while not engine.finished:
        waits = engine._state.engine[0].waiting > 0
        telemetry = engine.advance(0.1)
        if waits and engine._state.engine[0].waiting > 0:
            idle_s += telemetry.interval_s * (1.0 - telemetry.busy_fraction)
    assert idle_s <= 1e-6 * engine.now_s
