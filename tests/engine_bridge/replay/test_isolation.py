"""Rule 16: steps stay short, small tenants' prompts go first and whole, and nobody starves."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.replaying import (
    FINISHED,
    T0,
    Row,
    engine_spec,
    replay,
    steps_of,
    trace_of,
    ttft_s,
)
from trimtab.engine_bridge.plan import Plan, load_plan, with_values
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import Trace

SMALL, BIG = 0, 1
STEP_MS = 15.0


def isolating(**more: object) -> Plan:
    """The shipped plan with the rule on, and no rule that gives requests up."""
    changes = {"isolation.longest_step_ms": STEP_MS, "feasible.window_ms": 0}
    return with_values(load_plan(), {**changes, **more})


def traffic(*rows: Row) -> Trace:
    return trace_of(rows, tenant_names=("small", "big"))


def test_no_step_of_a_big_tenant_is_longer_than_said() -> None:
    trace = traffic(*(Row(0.01 * k, T0, 3000, 20, BIG) for k in range(40)))
    for plan, within in ((isolating(), True), (load_plan(), False)):
        engine = ReplayEngine(trace, plan, engine_spec())
        longest_ms = max(step.step_ms_mean for step in steps_of(engine, trace, 20.0))
        assert (longest_ms <= STEP_MS) == within


def test_a_small_tenant_s_prompt_passes_a_long_one_that_has_begun() -> None:
    trace = traffic(Row(0.0, T0, 100_000, 4, BIG), Row(0.5, T0, 400, 4, SMALL))
    small = int(np.argmin(trace.prompt_tokens))
    for plan, passes in ((isolating(), True), (load_plan(), False)):
        q = replay(trace, engine_spec(), plan=plan).requests
        assert (q["first_token_s"][small] < q["first_token_s"].max()) == passes
        if passes:
            # The step that ran, and its own.
            assert ttft_s(q)[small] < 3e-3 * STEP_MS


def test_a_tenant_with_most_of_the_work_is_not_spared() -> None:
    """Its prompts do not pass those of the others, however short they are."""
    rows = [Row(0.0, T0, 40_000, 4, SMALL)]
    rows += [Row(0.1 + 1e-4 * k, T0, 300, 4, BIG) for k in range(400)]
    q = replay(traffic(*rows), engine_spec(), plan=isolating()).requests
    assert (q["outcome"] == FINISHED).all()
    last_big = q["first_token_s"][q["tenant"] == BIG].max()
    assert q["first_token_s"][q["tenant"] == SMALL].max() < last_big


@settings(max_examples=15, deadline=None)
@given(
    small_per_s=st.floats(20.0, 300.0),
    small_tokens=st.integers(1, 900),
    step_ms=st.floats(1.0, 40.0),
    fraction=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
def test_nobody_starves(
    small_per_s: float, small_tokens: int, step_ms: float, fraction: float, seed: int
) -> None:
    """A long prompt ends however many small tenants keep coming, in the steps that it must take."""
    rng = np.random.default_rng(seed)
    rows = [Row(0.05, T0, 4000, 4, 0)]
    at_s = 0.0
    while (at_s := at_s + rng.exponential(1 / small_per_s)) < 4.0:
        rows.append(Row(at_s, T0, small_tokens, 4, 1 + int(rng.integers(0, 30))))
    trace = trace_of(rows, tenant_names=tuple(f"t{n}" for n in range(31)))
    plan = isolating(
        **{"isolation.longest_step_ms": step_ms, "isolation.spared_fraction": fraction}
    )
    engine = ReplayEngine(trace, plan, engine_spec())
    least = plan.prefill.min_chunk_tokens
    row = int(np.flatnonzero(trace.tenant == 0)[0])
    steps = 0
    for step in steps_of(engine, trace, 1e4):
        steps += step.tiers[T0].prefill_tokens > 0
    q = engine.result().requests
    assert (q["outcome"] == FINISHED).all()
    assert q["first_token_s"][row] < 0.05 + 60.0
    assert steps <= 4000 / least + len(rows) * (1 + small_tokens / least) + 1
