"""Actions: zero is the static plan bit for bit, and whatever is in the box is finite and lawful."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.conformance.policy_conformance import PLAN
from trimtab.engine_bridge import limits
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import ActionError
from trimtab.engine_bridge.plan import load_plan, plan_from_yaml
from trimtab.envs.action import DEFAULT_KNOBS, DEFAULT_REACH, ActionMap

ACTIONS = ActionMap(PLAN)
STATIC = Allocation.static(PLAN)
_boxes = hnp.arrays(np.float32, ACTIONS.size, elements=st.floats(-1, 1, width=32))


def bits(allocation: Allocation) -> list[str]:
    """Every number with all its digits and its sign."""
    return [
        repr(value)
        for knob in astuple(allocation)
        for value in (knob if isinstance(knob, tuple) else (knob,))
    ]


def entry(name: str, value: float = 1.0) -> np.ndarray:
    action = np.zeros(ACTIONS.size)
    action[ACTIONS.schema.names.index(name)] = value
    return action


@pytest.mark.parametrize("plan", ["default", "published"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_zero_is_the_static_plan_bit_for_bit(plan: str, zero: float) -> None:
    of = load_plan(plan)
    actions = ActionMap(of)
    asked = actions.allocation(np.full(actions.size, zero, np.float32))
    assert bits(asked) == bits(Allocation.static(of))


def test_zero_gives_back_shares_that_do_not_quite_sum_to_one() -> None:
    plan = plan_from_yaml(
        "name: thirds\n"
        "tiers:\n"
        + "".join(
            f"  T{i}: {{weight: 1, pool: p{i}, prefill_share: {share}, targets: {{ttft_ms: 9}}}}\n"
            for i, share in enumerate((0.1, 0.2, 0.7))
        )
        + "pools: {p0: 0.7, p1: 0.2, p2: 0.1}\n"
    )
    actions = ActionMap(plan)
    assert bits(actions.allocation(np.zeros(actions.size))) == bits(Allocation.static(plan))


@given(_boxes, _boxes)
def test_every_action_in_the_box_is_finite_and_lawful_once_projected(
    before: np.ndarray, action: np.ndarray
) -> None:
    asked = ACTIONS.allocation(action)
    asked.check_shape(PLAN)
    values = [v for knob in astuple(asked) for v in (knob if isinstance(knob, tuple) else (knob,))]
    assert np.isfinite(np.array(values, np.float64)).all()
    assert sum(asked.kv_fractions) == pytest.approx(1.0)
    assert sum(asked.prefill_shares) == pytest.approx(1.0)
    held = limits.project(ACTIONS.allocation(before), STATIC, PLAN).allocation
    now = limits.project(asked, held, PLAN)
    assert limits.LimitReason.NOT_FINITE not in now.reasons
    assert limits.LimitReason.CLOSED not in now.reasons
    assert limits.project(now.allocation, held, PLAN).allocation == now.allocation


@given(_boxes)
def test_knobs_that_are_not_acted_on_stay_static(action: np.ndarray) -> None:
    asked = ACTIONS.allocation(action)
    others = {"retention", "draft_tokens", "max_running", "max_num_seqs", "version"}
    kept = {knob: getattr(STATIC, knob) for knob in DEFAULT_KNOBS}
    assert replace(asked, **kept) == STATIC
    assert {knob: getattr(asked, knob) for knob in others} == {
        knob: getattr(STATIC, knob) for knob in others
    }


@pytest.mark.parametrize("name", ACTIONS.schema.names)
def test_each_entry_moves_what_it_names_and_nothing_else(name: str) -> None:
    knob, _, owner = name.partition(".")
    up, down = ACTIONS.allocation(entry(name)), ACTIONS.allocation(entry(name, -1.0))
    assert replace(up, **{knob: getattr(STATIC, knob)}) == STATIC
    moved, home, lowered = getattr(up, knob), getattr(STATIC, knob), getattr(down, knob)
    if owner:
        of = PLAN.pool_names if knob == "kv_fractions" else PLAN.tier_names
        place = of.index(owner)
        moved, home, lowered = moved[place], home[place], lowered[place]
    assert lowered < home < moved


def test_weights_that_all_rise_stay_where_they_are() -> None:
    together = sum(entry(name) for name in ACTIONS.schema.names if name.startswith("weights."))
    assert ACTIONS.allocation(together).weights == pytest.approx(STATIC.weights)


def test_reach_is_how_far_an_entry_of_one_goes() -> None:
    wide = ActionMap(PLAN, ["prefill_budget_tokens", "slack_fraction"], {
        "prefill_budget_tokens": np.log(2), "slack_fraction": 0.1,
    })  # fmt: skip
    asked = wide.allocation([1.0, -1.0])
    assert asked.prefill_budget_tokens == 2 * STATIC.prefill_budget_tokens
    assert asked.slack_fraction == pytest.approx(STATIC.slack_fraction - 0.1)


def test_entries_beyond_the_box_count_as_its_edge() -> None:
    edge = ACTIONS.allocation(np.ones(ACTIONS.size))
    assert ACTIONS.allocation(np.full(ACTIONS.size, 1e9)) == edge
    assert ACTIONS.allocation(np.full(ACTIONS.size, np.inf)) == edge


def test_closed_knobs_and_idle_entries_are_left_out() -> None:
    bounds = PLAN.controller.bounds.model_copy(update={"shed_at": None, "slack_fraction": None})
    controller = PLAN.controller.model_copy(update={"bounds": bounds})
    actions = ActionMap(PLAN.model_copy(update={"controller": controller}))
    assert "shed_at" not in actions.schema.knobs
    assert "slack_fraction" not in actions.schema.knobs
    assert "shed_at.T0" not in ACTIONS.schema.names
    assert "shed_at.T1" in ACTIONS.schema.names


@pytest.mark.parametrize(
    ("action", "told"),
    [
        (np.zeros(3), r"action: shape: .*\(3,\).*must be \(17,\)"),
        (np.zeros((1, 17)), r"shape"),
        (np.full(17, np.nan), r"action: weights\.T0: nan, must be a number in \[-1, 1\]"),
        (["much"] * 17, r"action: .*must be 17 numbers"),
    ],
)
def test_an_action_that_is_none_is_refused_in_one_line(action: object, told: str) -> None:
    with pytest.raises(ActionError, match=told) as refused:
        ACTIONS.allocation(action)
    assert "\n" not in str(refused.value)


def test_unknown_knobs_and_bad_reaches_are_refused() -> None:
    with pytest.raises(ActionError, match='did you mean "weights"'):
        ActionMap(PLAN, ["wieghts"])
    with pytest.raises(ActionError, match=r"reach\.weights"):
        ActionMap(PLAN, ["weights"], {"weights": 0.0})
    with pytest.raises(ActionError, match=r"reach\.shed_at: null"):
        ActionMap(PLAN, ["shed_at"], {"weights": 1.0})


def test_the_digest_tells_knobs_reach_and_names_apart() -> None:
    digests = {
        ACTIONS.schema.digest,
        ActionMap(PLAN, ["weights"]).schema.digest,
        ActionMap(PLAN, ["weights"], {"weights": 0.5}).schema.digest,
        ActionMap(
            load_plan("published"), DEFAULT_KNOBS, {**DEFAULT_REACH, "weights": 2}
        ).schema.digest,
    }
    assert len(digests) == 4
    again = ActionMap(PLAN, ACTIONS.schema.knobs, ACTIONS.schema.reach)
    assert again.schema.digest == ACTIONS.schema.digest
