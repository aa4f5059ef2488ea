"""Case 5 on the real engine: a cache that is too small makes no storm of preemptions."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("vllm", reason="runs vLLM's own scheduler")

from tests.cases.real_vllm.serving import Engine, serve
from tests.cases.replaying import FINISHED, T0, T2, engine_spec, trace_of, ttft_s
from tests.cases.test_preemption_storm import (
    POISON_TOKENS,
    Traffic,
    expect_a_refusal_at_once,
    expect_everybody_ends,
    recomputed_fraction,
    since_poison_s,
)
from trimtab.engine_bridge.plan import load_plan, with_values

SHORT = Traffic(requests=250, rate=8.0, blocks=11_000)
VARIANTS = [
    SHORT,
    Traffic(requests=250, rate=7.0, blocks=9000, seed=7, poison=True),
    Traffic(requests=200, rate=7.0, blocks=10_000, mix=(0.7, 0.1, 0.1, 0.1), seed=8),
    Traffic(requests=200, rate=7.0, blocks=10_000, mix=(0.05, 0.05, 0.6, 0.3), seed=9),
]


def test_stock_rules_preempt_and_make_paying_requests_wait() -> None:
    q = SHORT.run("fcfs", serve).requests
    assert (q["outcome"] == FINISHED).all()
    assert np.mean(q["preemptions"] > 0) > 0.05
    fair = SHORT.run(serve=serve).requests
    stock_s, fair_s = (np.median(ttft_s(one)[one["tier"] == T0]) for one in (q, fair))
    assert stock_s > 10.0 * fair_s
    assert fair_s < 1.0


@pytest.mark.parametrize("traffic", VARIANTS, ids=str)
def test_everybody_ends_and_nobody_is_tossed_about(traffic: Traffic) -> None:
    expect_everybody_ends(traffic, serve)


def test_first_tokens_are_quick_again_five_seconds_after_a_long_prompt() -> None:
    q = Traffic(requests=250, rate=5.0, blocks=15_600, seed=12, poison=True).run(serve=serve)
    since = since_poison_s(q.requests)
    paying = (q.requests["tier"] == T0) & (q.requests["prompt_tokens"] != POISON_TOKENS)
    later = paying & np.isfinite(since) & (since >= 5.0)
    assert later.sum() > 30
    assert np.quantile(ttft_s(q.requests)[later], 0.99) <= 0.7
    assert recomputed_fraction(q.requests) <= 0.25


@pytest.mark.parametrize("tier", [T0, T2])
def test_a_request_larger_than_the_cache_is_refused_at_once(tier: int) -> None:
    expect_a_refusal_at_once(tier, serve)


def test_backing_off_never_idles_the_engine_while_others_can_run() -> None:
    # A long back-off makes the fault visible if it is there.
    plan = with_values(load_plan(), {"backoff.per_waiting_ms": 1000.0, "backoff.max_ms": 5000.0})
    traffic = Traffic(requests=150, rate=8.0, blocks=4000, mix=(0.2, 0.1, 0.4, 0.3))
    spec = engine_spec(num_gpu_blocks=traffic.blocks)
    engine = Engine(trace_of(traffic.rows()), spec, plan=plan)
    idle_s, end_s, waits = 0.0, 0.0, False
    while (step := engine.step()) is not None:
        if waits:
            idle_s += step.start_s - end_s
        end_s, waits = step.end_s, len(engine.scheduler.waiting) > 0
    assert engine.requests()["preemptions"].sum() > 10
    assert idle_s <= 1e-6 * engine.now_s
