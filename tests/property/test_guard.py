"""No policy behind the guard costs more than the stated budget: a loaded replay, hostile policies.

The policies are the real thing's worst cases, not random noise alone: constants that starve one
tier within the guard's reach, corners that come and go, garbage, and whatever hypothesis draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.agents.guard import Guard
from trimtab.agents.policy import Policy
from trimtab.agents.static import StaticPolicy
from trimtab.agents.verdict import GuardReason
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.trace import Trace
from trimtab.envs.action import ActionMap
from trimtab.envs.score import weighted_attainment
from trimtab.training.traces.generate import generate
from trimtab.training.whatif import metrics

PLAN = load_plan()
SPEC = get_engine_spec("h100:llama-3.1-8b-tp1")
STATIC = Allocation.static(PLAN)
ACTIONS = ActionMap(PLAN, reach={knob: 1.5 for knob in ActionMap(PLAN).schema.knobs})
"""Reaches further than the guard does, so that its corners are the guard's."""
HOURS = 1 / 3
DRAIN_S = 600.0
TRAFFIC = (("bursty", 1.1, 3), ("incidents", 1.3, 3), ("waves", 1.1, 2))
"""Preset, offered load, seed. Overload is where a policy can do most harm."""

Answer = Callable[[int, Telemetry], Any]
"""Interval's number and telemetry to a proposal."""


class Hostile(Policy):
    """Answers as it is told."""

    name = "hostile"
    summary = "answers as it is told"

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def _reset(self, plan: Plan, seed: int) -> None:
        self._count = 0

    def _act(self, telemetry: Telemetry, plan: Plan) -> Allocation:
        self._count += 1
        return self._answer(self._count, telemetry)


@cache
def traffic(preset: str, load: float, seed: int) -> Trace:
    return generate(hours=HOURS, seed=seed, preset=preset, load=load, spec=SPEC)


def attained(trace: Trace, policy: Policy) -> float:
    """Weighted attainment of a run of the real replay."""
    policy.reset(PLAN, 0)
    engine = ReplayEngine(trace, PLAN, SPEC)
    limit_s = trace.duration_s + DRAIN_S
    while not engine.finished and engine.now_s < limit_s:
        engine.apply(policy.act(engine.advance(PLAN.controller.interval_s)))
    result = engine.result()
    by = metrics.yardstick(trace, PLAN)
    return weighted_attainment(by.demand, metrics.judge(result, by).met.every)


@cache
def attained_by_static(case: tuple[str, float, int]) -> float:
    return attained(traffic(*case), StaticPolicy())


def within_budget(case: tuple[str, float, int], answer: Answer) -> Guard:
    """Run a guarded policy and hold it to the budget."""
    guard = Guard(Hostile(answer))
    trace = traffic(*case)
    lost = attained_by_static(case) - attained(trace, guard)
    budget = guard.settings.budget(trace.duration_s)
    assert lost <= budget, f"{case}: lost {lost:.4f} of at most {budget:.4f}, {guard.tally}"
    return guard


def corner(**ends: float) -> Allocation:
    """The entries that begin with a key at an end of the reach, the others static."""
    action = [
        next((end for key, end in ends.items() if name.replace(".", "_").startswith(key)), 0.0)
        for name in ACTIONS.schema.names
    ]
    return ACTIONS.allocation(np.array(action))


UPSIDE_DOWN = replace(
    STATIC,
    weights=(0.1, 0.1, 1.0, 10_000.0),
    kv_fractions=(0.02, 0.02, 0.96),
    prefill_budget_tokens=256,
    prefill_shares=(0.01, 0.01, 0.01, 0.97),
    slack_fraction=0.0,
    low_tier_chunk_share=0.01,
)
STARVE_BATCH = corner(
    prefill_budget=-1, low_tier=-1, prefill_shares_T2=-1, weights_T2=-1, shed_at_T2=1
)
STARVE_CHAT = corner(
    weights_T0=-1, prefill_shares_T0=-1, kv_fractions_interactive=-1, low_tier=1, slack=-1
)
HUGE = replace(
    STATIC,
    weights=(1e9,) * 4,
    kv_fractions=(1e9, 0.0, 0.0),
    prefill_budget_tokens=10**9,
    prefill_shares=(0.0, 0.0, 0.0, 1e9),
    slack_fraction=1e9,
    low_tier_chunk_share=1e9,
    shed_at=(1e9,) * 4,
)
NOT_A_NUMBER = replace(STATIC, weights=(float("nan"),) * 4)


def raises(count: int, seen: Telemetry) -> Allocation:
    raise ZeroDivisionError("the policy has a fault")


def walk(seed: int) -> Answer:
    """A random walk over the actions, which never forgets where it is."""
    rng = np.random.default_rng(seed)
    place = np.zeros(ACTIONS.size)

    def steps(count: int, seen: Telemetry) -> Allocation:
        nonlocal place
        place = np.clip(place + rng.normal(0, 0.2, ACTIONS.size), -1, 1)
        return ACTIONS.allocation(place)

    return steps


ANSWERS: dict[str, Answer] = {
    "upside down": lambda count, seen: UPSIDE_DOWN,
    "starves batch": lambda count, seen: STARVE_BATCH,
    "starves chat": lambda count, seen: STARVE_CHAT,
    "huge": lambda count, seen: HUGE,
    "corners that come and go": lambda count, seen: (STARVE_BATCH, STARVE_CHAT)[count // 15 % 2],
    "harm that hides": lambda count, seen: STATIC if count // 30 % 2 else UPSIDE_DOWN,
    "random walk": walk(0),
    "not a number": lambda count, seen: NOT_A_NUMBER,
    "now and then not a number": lambda count, seen: STARVE_BATCH if count % 90 else NOT_A_NUMBER,
    "raises": raises,
    "now and then raises": lambda count, seen: UPSIDE_DOWN if count % 70 else raises(count, seen),
}
STILL = ("not a number", "raises")
"""They never pass the probation, so one trace shows it."""


@pytest.mark.parametrize("name", [name for name in ANSWERS if name not in STILL])
@pytest.mark.parametrize("case", TRAFFIC, ids=str)
def test_a_hostile_policy_costs_no_more_than_the_budget(
    case: tuple[str, float, int], name: str
) -> None:
    guard = within_budget(case, ANSWERS[name])
    assert guard.tally.intervals > 0


@pytest.mark.parametrize("name", STILL)
def test_a_policy_that_never_gives_an_answer_is_static(name: str) -> None:
    case = TRAFFIC[0]
    guard = Guard(Hostile(ANSWERS[name]))
    assert attained(traffic(*case), guard) == attained_by_static(case)
    assert guard.tally.trips == 0


@given(
    st.lists(
        st.tuples(
            st.integers(1, 200),
            st.lists(
                st.sampled_from([-1.0, 0.0, 1.0]), min_size=ACTIONS.size, max_size=ACTIONS.size
            ),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(TRAFFIC),
)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
def test_corners_in_any_order_cost_no_more_than_the_budget(
    stretches: Sequence[tuple[int, list[float]]], case: tuple[str, float, int]
) -> None:
    allocations = [(length, ACTIONS.allocation(np.array(action))) for length, action in stretches]
    period = sum(length for length, _ in allocations)

    def answer(count: int, seen: Telemetry) -> Allocation:
        at = count % period
        for length, allocation in allocations:
            if at < length:
                return allocation
            at -= length
        raise AssertionError

    within_budget(case, answer)


def test_without_the_guard_the_same_policies_cost_many_times_the_budget() -> None:
    case = TRAFFIC[1]
    trace = traffic(*case)
    lost = attained_by_static(case) - attained(trace, Hostile(ANSWERS["upside down"]))
    assert lost > 5 * Guard(StaticPolicy()).settings.budget(trace.duration_s)


def test_harm_is_what_trips() -> None:
    guard = within_budget(TRAFFIC[1], ANSWERS["upside down"])
    assert guard.counts[GuardReason.SLO_REGRESSION] > 0
    assert guard.counts[GuardReason.FLOORS_AND_TOTALS] > 0
