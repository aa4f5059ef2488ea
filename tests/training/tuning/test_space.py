"""The space: what may be tuned, that every point is lawful, that the start is the plan itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import Plan, load_plan, plan_from_yaml, with_values
from trimtab.training.tuning.space import Space, changed, value_at

SPEC = get_engine_spec("h100:llama-3.1-8b-tp1")
PLANS = {"default": load_plan(), "published": load_plan("published")}
DOTTED = """
name: dotted
tiers:
  a.b: {weight: 2, pool: p.1, prefill_share: 0.6, targets: {ttft_ms: 800}}
  "7": {weight: 1, pool: p.2, prefill_share: 0.4, targets: {ttft_ms: 900}}
pools: {p.1: 0.5, p.2: 0.5}
"""


def at_random(space: Space, rng: np.random.Generator, *, edge: bool) -> dict[str, float]:
    point = {}
    for axis in space.dimensions:
        if edge:
            point[axis.name] = axis.low if rng.random() < 0.5 else axis.high
        elif axis.log:
            point[axis.name] = math.exp(rng.uniform(math.log(axis.low), math.log(axis.high)))
        else:
            point[axis.name] = rng.uniform(axis.low, axis.high)
    return point


@pytest.mark.parametrize("name", PLANS)
def test_the_start_changes_nothing(name: str) -> None:
    space = Space(PLANS[name], SPEC)
    assert space.changes(space.start) == {}
    for axis in space.dimensions:
        assert axis.low <= axis.start <= axis.high


@pytest.mark.parametrize("edge", [False, True])
@pytest.mark.parametrize("name", [*PLANS, "dotted", "narrow"])
def test_every_point_is_a_plan_that_keeps_to_its_bounds(name: str, edge: bool) -> None:
    narrow = with_values(
        PLANS["default"],
        {
            "controller.bounds.kv_fractions.floor": 0.090004,
            "controller.bounds.kv_fractions.ceiling": 0.700007,
            "controller.bounds.prefill_shares.floor": 0.04,
            "controller.bounds.prefill_shares.ceiling": 0.56,
        },
    )
    plan = {**PLANS, "dotted": plan_from_yaml(DOTTED), "narrow": narrow}[name]
    space = Space(plan, SPEC)
    rng = np.random.default_rng(3)
    for _ in range(200):
        changes = space.changes(at_random(space, rng, edge=edge))
        made = changed(plan, changes)  # Raises where a value is out of bounds or a sum is not 1.
        for path, value in changes.items():
            assert value_at(made, path) == value
        assert made.controller == plan.controller


def test_values_are_short() -> None:
    space = Space(PLANS["default"], SPEC)
    changes = space.changes(at_random(space, np.random.default_rng(0), edge=False))
    assert changes
    for value in changes.values():
        assert len(f"{value:g}".replace("0.", "").replace(".", "").strip("0")) <= 4


def names(plan: Plan) -> set[str]:
    return {axis.name for axis in Space(plan, SPEC).dimensions}


def test_the_default_plan_opens_what_the_controller_may_set() -> None:
    assert names(PLANS["default"]) == {
        "tiers.T0.weight", "tiers.T1.weight", "tiers.T2.weight",
        "pools.interactive", "pools.batch",
        "tiers.T0.prefill_share", "tiers.T1.prefill_share", "tiers.T2.prefill_share",
        "prefill.budget_tokens", "slack.slack_fraction", "slack.low_tier_chunk_share",
        "retention.classes.T0.factor", "retention.classes.T1-tool_use.factor",
        "retention.classes.T1.factor", "retention.classes.T2.factor",
        "retention.classes.T2-reused.factor", "retention.classes.T3.factor",
        "tiers.T1.shed.at_fraction", "tiers.T2.shed.at_fraction", "tiers.T3.shed.at_fraction",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "gone"),
    [
        ("controller.bounds.retention", None, "retention.classes.T0.factor"),
        ("controller.bounds.slack_fraction", None, "slack.slack_fraction"),
        ("controller.bounds.shed_at", None, "tiers.T1.shed.at_fraction"),
        ("controller.bounds.weights.max_change_factor", 1.0, "tiers.T0.weight"),
        ("controller.bounds.kv_fractions.max_change", 0.0, "pools.batch"),
        ("rules.prefill_shares", False, "tiers.T0.prefill_share"),
        ("rules.prefill_budget", False, "prefill.budget_tokens"),
        ("rules.late_shedding", False, "tiers.T1.shed.at_fraction"),
        ("rules.slack_chunk", False, "slack.low_tier_chunk_share"),
        ("retention.eviction", "lru", "retention.classes.T0.factor"),
        ("tiers.T1.shed.mode", "never", "tiers.T1.shed.at_fraction"),
    ],
)
def test_what_is_closed_frozen_or_switched_off_is_left_alone(
    key: str, value: object, gone: str
) -> None:
    assert gone in names(PLANS["default"])
    assert gone not in names(with_values(PLANS["default"], {key: value}))


def test_no_budget_above_the_engines_largest_step() -> None:
    budget = next(
        axis
        for axis in Space(PLANS["default"], SPEC).dimensions
        if axis.name == "prefill.budget_tokens"
    )
    assert budget.high == SPEC.max_num_batched_tokens
    assert budget.high < PLANS["default"].controller.bounds.prefill_budget_tokens.ceiling


def test_knobs_cover_all_that_a_point_changes() -> None:
    space = Space(PLANS["default"], SPEC)
    covered = {path for knob in space.knobs for path in knob}
    changes = space.changes(at_random(space, np.random.default_rng(1), edge=False))
    assert set(changes) <= covered


def test_shares_stay_lawful_at_the_edges_of_any_bounds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        plan = with_values(
            PLANS["default"],
            {
                "controller.bounds.kv_fractions.floor": rng.uniform(0.0, 0.1),
                "controller.bounds.kv_fractions.ceiling": rng.uniform(0.7, 1.0),
                "controller.bounds.prefill_shares.floor": rng.uniform(0.0, 0.05),
                "controller.bounds.prefill_shares.ceiling": rng.uniform(0.55, 1.0),
            },
        )
        space = Space(plan, SPEC)
        assert space.changes(space.start) == {}
        for _ in range(10):
            changed(plan, space.changes(at_random(space, rng, edge=True)))
