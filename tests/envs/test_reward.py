"""The reward: each term as its formula says, and nothing for the static plan beside its twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.envs.reward import Reward, RewardSettings, total
from trimtab.envs.twin import Twin, TwinMemory

REWARD = Reward(PLAN, RewardSettings())
INTERVAL_S = PLAN.controller.interval_s


def interval(**by_tier: dict[str, float]) -> Telemetry:
    return telemetry(PLAN, [tier_telemetry(**by_tier.get(name, {})) for name in PLAN.tier_names])


def test_goodput_is_one_when_all_that_is_offered_is_served() -> None:
    # 10 x 600 + 3 x 1000 tokens of value, over 2 s: 4.5 a second, in thousands.
    seen = interval(T0={"met_tokens": 600.0}, T1={"met_tokens": 1000.0})
    assert REWARD.earned(seen, 4.5)["goodput"] == pytest.approx(1.0)
    assert REWARD.earned(seen, 9.0)["goodput"] == pytest.approx(0.5)


def test_traffic_that_offers_nothing_earns_nothing() -> None:
    assert total(REWARD.earned(interval(), 0.0)) == 0.0


def test_floors_weigh_by_value_and_trust_and_spare_best_effort() -> None:
    def floors(**by_tier: dict[str, float]) -> float:
        return REWARD.earned(interval(**by_tier), 1.0)["floors"]

    missed = {"attainment": 0.0, "attainment_samples": 4}
    # T0: target 0.995, half trust, value 10 of 14 that are promised.
    assert floors(T0=missed) == pytest.approx(-0.995 * 0.5 * 10 / 14)
    assert floors(T1=missed) == pytest.approx(-0.95 * 0.5 * 3 / 14)
    assert floors(T3=missed) == 0.0
    assert floors(T0={"attainment": 1.0, "attainment_samples": 99}) == 0.0
    assert floors(T0={"attainment": 0.0, "attainment_samples": 0}) == 0.0


def test_preemptions_churn_and_gap_cost() -> None:
    settings = RewardSettings(preemptions=0.1, churn=2.0, gap=3.0)
    terms = Reward(PLAN, settings).terms(
        interval(T2={"preemptions": 4}), 1.0, moved=0.5, beyond=0.25, twin=0.125
    )
    assert terms == {
        "goodput": 0.0,
        "floors": 0.0,
        "preemptions": pytest.approx(-0.4),
        "churn": -1.0,
        "gap": -0.75,
        "twin": -0.125,
    }
    assert total(terms) == pytest.approx(-0.4 - 1.0 - 0.75 - 0.125)


@given(
    st.floats(0, 1e9),
    st.one_of(st.just(float("nan")), st.floats(0, 1)),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.floats(1e-6, 1e9),
)
def test_what_stands_still_earns_exactly_what_its_twin_does(
    met: float, attainment: float, samples: int, preemptions: int, offered: float
) -> None:
    seen = interval(
        T0={"met_tokens": met, "attainment": attainment, "attainment_samples": samples},
        T2={"preemptions": preemptions},
    )
    twin = total(REWARD.earned(seen, offered))
    assert total(REWARD.terms(seen, offered, moved=0.0, beyond=0.0, twin=twin)) == 0.0


def test_a_run_that_ends_before_its_twin_is_charged_the_rest() -> None:
    twin = Twin(np.array([1.0, 2.0, 4.0]))
    assert twin.earned(1, last=False) == 2.0
    assert twin.earned(1, last=True) == 6.0
    assert twin.earned(3, last=False) == twin.earned(5, last=True) == 0.0


def test_the_memory_keeps_the_twins_that_were_asked_for_last() -> None:
    made: list[str] = []

    def ask(key: str) -> Twin:
        def make() -> Twin:
            made.append(key)
            return Twin(np.zeros(1))

        return memory.twin(key, make)

    memory = TwinMemory(most=2)
    first = ask("a")
    ask("b")
    assert ask("a") is first
    ask("c")
    assert ask("a") is first
    ask("b")
    assert made == ["a", "b", "c", "b"]
