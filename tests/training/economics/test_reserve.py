"""Plans with a reserve moved: lawful at both ends, and only the reserve has moved."""

from __future__ import annotations

import pytest

from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import PlanError
from trimtab.engine_bridge.limits import Limits
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.plan.load import with_values
from trimtab.training.economics.reserve import KNOBS, reserve_of, with_reserve, within_bounds

PLAN = load_plan()


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("part", [0.0, 0.25, 0.7, 1.0])
@pytest.mark.parametrize("tier", ["T0", "T3"])
def test_the_reserve_is_what_was_asked_for(knob: str, part: float, tier: str) -> None:
    plan = with_reserve(PLAN, tier, part, [knob])
    assert reserve_of(plan, tier, knob) == pytest.approx(part, abs=0.01)
    for other in KNOBS:
        if other != knob:
            assert reserve_of(plan, tier, other) == reserve_of(PLAN, tier, other)


def test_the_others_keep_their_ratios() -> None:
    plan = with_reserve(PLAN, "T0", 0.2, ["kv", "prefill", "weight"])
    assert plan.pools["batch"] / plan.pools["free"] == pytest.approx(2.0)
    assert plan.tiers["T1"].prefill_share / plan.tiers["T3"].prefill_share == pytest.approx(6.0)
    assert plan.tiers["T1"].weight / plan.tiers["T3"].weight == pytest.approx(100.0)


@pytest.mark.parametrize("part", [0.0, 1.0])
def test_the_engine_takes_the_ends_as_they_are(part: float) -> None:
    plan = with_reserve(PLAN, "T0", part, KNOBS)
    static = Allocation.static(plan)
    assert Limits(plan, capacity_max_num_seqs=256).project(static, static).allocation == static


def test_what_a_controller_could_not_set_is_known() -> None:
    for part, inside in ((0.0, False), (0.01, False), (0.5, True), (1.0, False)):
        plan = with_reserve(PLAN, "T0", part, ["kv"])
        assert within_bounds(PLAN, plan, "T0", ["kv"]) is inside
    assert within_bounds(PLAN, PLAN, "T0", KNOBS)


def test_nobody_to_share_with_is_said() -> None:
    alone = {f"tiers.{name}.pool": "all" for name in PLAN.tiers}
    plan = with_values(PLAN, {**alone, "pools": {"all": 1.0}})
    with pytest.raises(PlanError, match="leave kv out"):
        with_reserve(plan, "T0", 0.5, ["kv"])
    assert reserve_of(with_reserve(plan, "T0", 0.5, ["prefill"]), "T0", "prefill") == 0.5
