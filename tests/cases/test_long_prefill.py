"""Case 1: a long prompt must not hold up short ones, nor be starved by them.

Reported for vLLM: with running requests served first, a 130,000-token prompt takes the whole token
budget of every step until it is done, and whoever arrives meanwhile waits for all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from tests.cases.replaying import (
    FINISHED,
    T0,
    T1,
    T2,
    T3,
    Row,
    Serve,
    Served,
    engine_spec,
    replay,
    steps_of,
    trace_of,
    ttft_s,
)
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine, RuleSet
from trimtab.engine_bridge.rules.budget import predicted_step_ms
from trimtab.engine_bridge.trace import Trace

LONG_ARRIVES_S, END_S = 1.0, 61.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One variant of the case."""

    budget: int = 2048
    decodes: int = 32
    long_tokens: int = 130_000
    long_tier: int = T2
    short_tokens: int = 200
    rate: float = 5.0
    seed: int = 1
    end_s: float = END_S

    def trace(self) -> Trace:
        """The decodes, the long prompt, and shorts at random times after it."""
        rng = np.random.default_rng(self.seed)
        rows = [Row(0.0, T0, 100, 257)] * self.decodes
        rows.append(Row(LONG_ARRIVES_S, self.long_tier, self.long_tokens, 4))
        at_s = LONG_ARRIVES_S
        while (at_s := at_s + rng.exponential(1 / self.rate)) < self.end_s:
            rows.append(Row(at_s, T1, self.short_tokens, 64))
        return trace_of(rows)


PUBLISHED = [Setting(budget=budget) for budget in (512, 2048, 8192)]
OTHERS = [
    Setting(long_tier=T3),
    Setting(rate=20.0, seed=2),
    Setting(budget=512, rate=20.0, seed=3),
    Setting(budget=8192, long_tokens=60_000, decodes=128, seed=4),
    Setting(budget=1024, decodes=64, long_tokens=90_000, short_tokens=500, seed=5),
]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, seen step by step from the long prompt's arrival until its first token."""

    result: Served
    end_s: np.ndarray
    step_ms: np.ndarray
    prefill_tokens: np.ndarray
    """(steps, tiers)"""
    decode_tokens: np.ndarray
    """(steps, tiers)"""
    long: int
    """Row of the long prompt."""


def run(setting: Setting, rules: RuleSet) -> Run:
    trace = setting.trace()
    spec = engine_spec(max_num_batched_tokens=setting.budget)
    engine = ReplayEngine(trace, load_plan(), spec, rules=rules)
    engine.advance(LONG_ARRIVES_S)
    long = int(np.argmax(trace.prompt_tokens))
    seen = []
    for step in steps_of(engine, trace, END_S):
        seen.append(step)
        if step.tiers[setting.long_tier].decode_tokens:
            break
    while not engine.finished:
        engine.advance(1.0)
    return Run(
        result=engine.result(),
        end_s=np.array([step.time_s for step in seen]),
        step_ms=np.array([step.step_ms_mean for step in seen]),
        prefill_tokens=np.array([[t.prefill_tokens for t in step.tiers] for step in seen]),
        decode_tokens=np.array([[t.decode_tokens for t in step.tiers] for step in seen]),
        long=long,
    )


def alone_s(setting: Setting, serve: Serve = replay) -> float:
    """Time to first token of the long prompt on an idle engine."""
    trace = trace_of([Row(0.0, setting.long_tier, setting.long_tokens, 4)])
    spec = engine_spec(max_num_batched_tokens=setting.budget)
    return float(ttft_s(serve(trace, spec).requests)[0])


def shorts_meanwhile(got: Run) -> np.ndarray:
    """Rows of the shorts that arrived while the long prompt was being computed."""
    q = got.result.requests
    admitted, first = q["admitted_s"][got.long], q["first_token_s"][got.long]
    rows: np.ndarray = np.flatnonzero(
        (q["tier"] == T1) & (q["arrival_s"] > admitted) & (q["arrival_s"] < first)
    )
    return rows


@pytest.mark.parametrize("rules", ["fcfs", "priority"])
@pytest.mark.parametrize("setting", PUBLISHED, ids=lambda s: str(s.budget))
def test_stock_rules_make_shorts_wait_for_the_whole_long_prompt(
    setting: Setting, rules: RuleSet
) -> None:
    expect_shorts_to_wait(setting, run(setting, rules))


def expect_shorts_to_wait(setting: Setting, got: Run) -> None:
    q = got.result.requests
    steps = int(np.sum(got.prefill_tokens[:, T2] > 0))
    assert steps >= math.ceil(setting.long_tokens / setting.budget)
    assert steps <= math.ceil(setting.long_tokens / (setting.budget - setting.decodes)) + 1
    late = shorts_meanwhile(got)
    # All but the last step's: nobody gets a token before the long prompt is through.
    assert len(late) > 10
    early = q["first_token_s"][late] < q["first_token_s"][got.long]
    assert not early.any()
    assert np.quantile(ttft_s(q)[late], 0.99) > 0.9 * ttft_s(q)[got.long] - 1.0


@pytest.mark.parametrize("setting", PUBLISHED + OTHERS, ids=str)
def test_shorts_go_on_beside_a_long_prompt(setting: Setting) -> None:
    expect_shorts_to_go_on(setting, run(setting, "fair"))


def expect_shorts_to_go_on(setting: Setting, got: Run) -> None:
    q = got.result.requests
    assert (q["outcome"] == FINISHED).all()
    rows = shorts_meanwhile(got)
    budget = min(setting.budget, load_plan().prefill.budget_tokens)
    own = math.ceil(setting.short_tokens / budget / 0.9)
    waited = np.searchsorted(got.end_s, q["first_token_s"][rows] + 1e-9) - np.searchsorted(
        got.end_s, q["arrival_s"][rows]
    )
    assert len(rows) > 10
    assert np.quantile(waited, 0.99) <= own + 3


@pytest.mark.parametrize("setting", PUBLISHED + OTHERS, ids=str)
def test_tokens_come_at_the_pace_of_a_decode_step_and_a_budgeted_chunk(setting: Setting) -> None:
    expect_a_steady_pace(setting, run(setting, "fair"))


def expect_a_steady_pace(setting: Setting, got: Run) -> None:
    plan, spec = load_plan(), engine_spec()
    weight = got.decode_tokens[:, T0] + got.decode_tokens[:, T1]
    between_ms = np.repeat(got.step_ms, weight)
    budget = min(setting.budget, plan.prefill.budget_tokens)
    low = math.ceil(plan.slack.low_tier_chunk_share * budget)
    beside = np.quantile(got.prefill_tokens[:, T1], 0.99)
    decodes = float(np.quantile(weight, 0.99))
    allowed_ms = predicted_step_ms(
        spec.coef,
        decodes,
        decodes * 400.0,
        2.0,
        low + beside,
        low * float(setting.long_tokens) + beside**2,
    )
    assert np.quantile(between_ms, 0.99) <= allowed_ms
    # A step with a protected decode in it carries the low tiers' part of the long prompt at most.
    shared = (got.decode_tokens[:, T0] + got.decode_tokens[:, T1] > 0) & (
        got.prefill_tokens[:, T1] == 0
    )
    assert np.quantile(got.prefill_tokens[shared, setting.long_tier], 0.99) <= low


@pytest.mark.parametrize("setting", PUBLISHED + OTHERS, ids=str)
def test_the_long_prompt_is_not_starved_and_no_tokens_are_lost(setting: Setting) -> None:
    expect_no_starvation(setting, replay)


def expect_no_starvation(setting: Setting, serve: Serve) -> None:
    plan, spec = load_plan(), engine_spec(max_num_batched_tokens=setting.budget)
    share = list(plan.tiers.values())[setting.long_tier].prefill_share
    rule_sets: tuple[RuleSet, ...] = ("fair", "fcfs")
    fair, stock = (serve(setting.trace(), spec, rules) for rules in rule_sets)
    long = int(np.argmax(fair.requests["prompt_tokens"]))
    assert ttft_s(fair.requests)[long] <= alone_s(setting, serve) / share
    # The same tokens: the rate is the inverse of the time that they took.
    assert fair.end_s <= 1.1 * stock.end_s
    assert fair.engine_busy_s <= 1.1 * stock.engine_busy_s
