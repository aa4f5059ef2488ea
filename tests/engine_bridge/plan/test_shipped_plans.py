from __future__ import annotations

import hashlib
import json
import math

import pytest

from trimtab.engine_bridge.allocation import UNLIMITED, Allocation
from trimtab.engine_bridge.errors import PlanError
from trimtab.engine_bridge.plan import (
    SHIPPED,
    Plan,
    load_plan,
    plan_from_yaml,
    schema,
    with_values,
)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_plans_load_under_their_name(name: str) -> None:
    plan = load_plan(name)
    assert plan.name == name
    assert plan.tier_names == ("T0", "T1", "T2", "T3")
    assert math.fsum(plan.pools.values()) == pytest.approx(1, abs=1e-9)


def test_no_name_is_the_default_plan(default_plan: Plan) -> None:
    assert load_plan(None).digest == load_plan("default").digest == default_plan.digest


def test_the_default_plan_promises_paid_chat_800_ms(default_plan: Plan) -> None:
    targets = default_plan.tiers["T0"].targets
    assert (targets.ttft_ms, targets.attainment) == (800, 0.995)
    assert default_plan.tiers["T3"].targets.best_effort


def test_the_published_plan_is_the_published_configuration() -> None:
    plan = load_plan("published")
    assert tuple(plan.pools.values()) == (0.7, 0.2, 0.1)
    assert plan.prefill.budget_tokens == 4096
    assert tuple(tier.weight for tier in plan.tiers.values()) == (8, 4, 2, 1)
    assert plan.retention.eviction == "lru"
    assert set(plan.retention_factors) == {1.0}
    off = ("slack_chunk", "feasible_first", "late_shedding")
    assert [name for name, on in plan.rules if not on] == list(off)


def test_positions_follow_the_file(default_plan: Plan) -> None:
    assert default_plan.pool_of_tier == (0, 0, 1, 2)
    assert default_plan.tier_index("T2") == 2
    with pytest.raises(PlanError, match=r'"t2", must be one of T0, T1, T2, T3; did you mean "T2"'):
        default_plan.tier_index("t2")


@pytest.mark.parametrize(
    ("tier", "stop_reason", "reused", "expected"),
    [
        (0, "", False, "T0"),
        (1, "tool_use", False, "T1-tool_use"),
        (1, "end_turn", True, "T1"),
        (2, "", False, "T2"),
        (2, "", True, "T2-reused"),
        (3, "tool_use", True, "T3"),
    ],
)
def test_the_class_with_most_marks_keeps_a_block(
    default_plan: Plan, tier: int, stop_reason: str, reused: bool, expected: str
) -> None:
    index = default_plan.retention_class(tier, stop_reason, reused)
    assert default_plan.retention_names[index] == expected


def test_without_classes_each_tier_is_one(default_plan: Plan) -> None:
    plan = with_values(default_plan, {"retention.classes": {}})
    assert [plan.retention_class(tier, "tool_use", True) for tier in range(4)] == [0, 1, 2, 3]
    assert plan.retention_factors == (1.0,) * 4


def test_a_short_plan_takes_the_rest_from_the_default(default_plan: Plan) -> None:
    plan = plan_from_yaml("""
name: short
tiers:
  only: {weight: 1, pool: all, prefill_share: 1, targets: {ttft_ms: 500}}
pools: {all: 1}
slack: {slack_fraction: 0.5}
""")
    assert plan.slack.slack_fraction == 0.5
    assert plan.slack.tpot_fraction == default_plan.slack.tpot_fraction
    assert plan.controller == default_plan.controller
    assert Allocation.static(plan).max_running == (UNLIMITED,)


def test_digest_is_of_behaviour_not_of_words(default_plan: Plan) -> None:
    assert with_values(default_plan, {"description": "other"}).digest == default_plan.digest
    assert with_values(default_plan, {"tiers.T0.description": "x"}).digest == default_plan.digest
    assert with_values(default_plan, {"rules.kv_pools": False}).digest != default_plan.digest


def test_what_plans_have_not_always_had_leaves_their_digest_alone(default_plan: Plan) -> None:
    """Bundles name the digest of the plan that they were trained under."""
    named = with_values(default_plan, {"tenants.acme": {"tier": "T0"}})
    content = named.model_dump(mode="json", exclude={"description": True, "metrics": True})
    since = [(content, schema.SECTIONS_SINCE)]
    since += [(content["feasible"], schema.FEASIBLE_FIELDS_SINCE)]
    since += [(content["tenants"]["acme"], schema.TENANT_FIELDS_SINCE)]
    since += [(tier, schema.TIER_FIELDS_SINCE) for tier in content["tiers"].values()]
    for part, names in since:
        part.pop("description", None)
        for name in names:
            del part[name]
    assert named.digest == hashlib.sha256(json.dumps(content).encode()).hexdigest()
    assert with_values(named, {"tenants.acme.interactive": True}).digest != named.digest


def test_a_tenant_may_be_an_exception_to_its_tier_s_interactive(default_plan: Plan) -> None:
    plan = with_values(
        default_plan,
        {
            "aging.interactive_bonus": 0.25,
            "tiers.T0.interactive": True,
            "tenants.bulk": {"tier": "T0", "interactive": False},
            "tenants.live": {"tier": "T2", "interactive": True},
            "tenants.plain": {"tier": "T0"},
        },
    )
    asked = [("bulk", 0), ("plain", 0), ("unknown", 0), ("live", 2), ("unknown", 2)]
    assert [plan.tenant_bonus(*who) for who in asked] == [0.0, 0.25, 0.25, 0.25, 0.0]


def test_changed_values_are_checked(default_plan: Plan) -> None:
    with pytest.raises(PlanError, match=r'rules\.kv_pool: .*did you mean "kv_pools"'):
        with_values(default_plan, {"rules.kv_pool": False})
    with pytest.raises(PlanError, match=r'ruls\.kv_pools: .*did you mean "rules"'):
        with_values(default_plan, {"ruls.kv_pools": False})
    with pytest.raises(PlanError, match=r"tiers\.T0\.weight: 0, must be at least 1e-06"):
        with_values(default_plan, {"tiers.T0.weight": 0})
    assert default_plan.rules.kv_pools
