"""Observations: always in the box, no data is told from zero, training and serving agree."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conformance.policy_conformance import PLAN, telemetry, tier_telemetry
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.errors import AllocationError
from trimtab.engine_bridge.plan import Plan, plan_from_yaml
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry
from trimtab.envs.allocation_env import AllocationEnv
from trimtab.envs.observation import Observer
from trimtab.envs.observation_schema import observation_schema

NAN, INF = float("nan"), float("inf")
_anything = st.one_of(
    st.floats(), st.integers(-(10**18), 10**18), st.sampled_from([0, -0.0, NAN, INF, -INF, 1e308])
)


@st.composite
def any_telemetry(draw: st.DrawFn) -> Telemetry:
    """Figures of the right shape with any numbers in them."""
    tiers = tuple(
        TierTelemetry(**{field.name: draw(_anything) for field in fields(TierTelemetry)})
        for _ in PLAN.tiers
    )
    static = Allocation.static(PLAN)
    applied = replace(
        static,
        weights=tuple(draw(_anything) for _ in static.weights),
        slack_fraction=draw(_anything),
        prefill_budget_tokens=draw(_anything),
        kv_fractions=tuple(draw(_anything) for _ in static.kv_fractions),
    )
    engine = [field.name for field in fields(Telemetry) if field.name not in ("tiers", "applied")]
    return Telemetry(tiers=tiers, applied=applied, **{name: draw(_anything) for name in engine})


@given(st.lists(any_telemetry(), min_size=1, max_size=4))
def test_every_observation_is_finite_and_in_the_box(run: list[Telemetry]) -> None:
    observer = Observer(PLAN)
    for seen in run:
        observation = observer.observe(seen)
        assert observation.dtype == np.float32
        assert observation.shape == (observer.schema.size,)
        assert np.isfinite(observation).all()
        assert (np.abs(observation) <= 1).all()


def named(observer: Observer, observation: np.ndarray) -> dict[str, float]:
    return dict(zip(observer.schema.names, observation.tolist(), strict=True))


def observed(**tier: float) -> dict[str, float]:
    """The observation of one interval in which something happened to T0 only."""
    observer = Observer(PLAN)
    tiers = [tier_telemetry(**tier), *(tier_telemetry() for _ in range(len(PLAN.tiers) - 1))]
    return named(observer, observer.observe(telemetry(PLAN, tiers)))


def test_names_are_unique_and_of_the_plan() -> None:
    names = observation_schema(PLAN).names
    assert len(set(names)) == len(names)
    assert {name.split(".")[0] for name in names} == {*PLAN.tier_names, "pool", "engine", "applied"}
    assert "applied.retention.T2-reused" in names
    assert "applied.draft_tokens.T0" not in names


def test_a_perfect_tier_is_told_from_a_silent_one() -> None:
    silent = observed()
    perfect = observed(attainment=PLAN.tiers["T0"].targets.attainment, attainment_samples=10**9)
    assert silent["T0.attainment"] == perfect["T0.attainment"] == 0
    assert silent["T0.attainment_known"] == 0
    assert perfect["T0.attainment_known"] == 1


def test_a_latency_on_target_is_told_from_none() -> None:
    assert observed()["T0.ttft_p99_known"] == 0
    on_target = observed(ttft_ms_p99=800.0, tpot_ms_p99=400.0, acceptance=0.5)
    assert on_target["T0.ttft_p99"] == 0
    assert on_target["T0.ttft_p99_known"] == 1
    assert on_target["T0.tpot_p99"] == pytest.approx(1.0)
    assert on_target["T0.acceptance"] == 0.5


def test_few_samples_move_the_attainment_little() -> None:
    one = observed(attainment=0.0, attainment_samples=1)["T0.attainment"]
    many = observed(attainment=0.0, attainment_samples=10**6)["T0.attainment"]
    assert one == pytest.approx(0.995 / 5)
    assert many == pytest.approx(0.995, abs=1e-4)


def test_waits_are_measured_against_the_tiers_own_target() -> None:
    assert observed(oldest_wait_s=0.8)["T0.oldest_wait"] == pytest.approx(
        math.log1p(10) / math.log1p(100)
    )


def test_a_count_that_is_no_number_is_told() -> None:
    assert observed()["engine.known"] == 1
    assert observed(queue_length=NAN)["engine.known"] < 1


def test_averages_forget_at_their_pace() -> None:
    observer = Observer(PLAN)
    seen = {}
    for interval in range(1, 40):
        busy = tier_telemetry(arrivals=20 if interval <= 30 else 0)
        rest = [tier_telemetry() for _ in range(len(PLAN.tiers) - 1)]
        seen = named(
            observer, observer.observe(telemetry(PLAN, [busy, *rest], time_s=2.0 * interval))
        )
        if interval == 30:
            assert seen["T0.arrivals_10s"] == pytest.approx(seen["T0.arrivals_60s"], abs=1e-6)
            assert seen["T0.arrivals_trend"] == pytest.approx(0.0, abs=1e-6)
    assert seen["T0.arrivals_10s"] < seen["T0.arrivals_60s"]
    assert seen["T0.arrivals_trend"] < -0.5


def test_attainment_is_remembered_between_the_samples() -> None:
    observer = Observer(PLAN)
    missed = [tier_telemetry(attainment=0.0, attainment_samples=50) for _ in PLAN.tiers]
    observer.observe(telemetry(PLAN, missed))
    seen = named(observer, observer.observe(telemetry(PLAN, time_s=4.0)))
    assert seen["T0.attainment_known"] == 0
    assert seen["T0.attainment_60s_known"] == 1
    assert seen["T0.attainment_60s"] > 0.8
    for interval in range(300):
        seen = named(observer, observer.observe(telemetry(PLAN, time_s=6.0 + 2.0 * interval)))
    assert seen["T0.attainment_60s_known"] == 0


def test_telemetry_that_comes_again_moves_no_average() -> None:
    once, twice = Observer(PLAN), Observer(PLAN)
    busy = telemetry(PLAN, [tier_telemetry(arrivals=9) for _ in PLAN.tiers])
    idle = telemetry(PLAN, time_s=4.0)
    for observer in (once, twice):
        observer.observe(busy)
    again = named(twice, twice.observe(replace(busy, age_s=2.0)))
    assert again["engine.age"] == pytest.approx(2.0 / PLAN.controller.lease_s)
    assert np.array_equal(once.observe(idle), twice.observe(idle))


def test_a_restart_forgets_the_run_before() -> None:
    observer = Observer(PLAN)
    busy = [tier_telemetry(arrivals=9) for _ in PLAN.tiers]
    observer.observe(telemetry(PLAN, busy, time_s=100.0))
    fresh = telemetry(PLAN, time_s=2.0)
    assert np.array_equal(observer.observe(fresh), Observer(PLAN).observe(fresh))


def test_the_static_plan_has_no_residual_and_others_do() -> None:
    observer = Observer(PLAN)
    static = Allocation.static(PLAN)
    still = named(observer, observer.observe(telemetry(PLAN)))
    assert not any(value for name, value in still.items() if name.startswith("applied."))
    moved = replace(
        static,
        weights=(static.weights[0] / 10, *static.weights[1:]),
        slack_fraction=static.slack_fraction - 0.25,
    )
    seen = named(observer, observer.observe(telemetry(PLAN, applied=moved, time_s=4.0)))
    assert seen["applied.weights.T0"] == pytest.approx(-1.0)
    assert seen["applied.slack_fraction"] == pytest.approx(-0.25)
    unknown = replace(static, slack_fraction=NAN)
    seen = named(observer, observer.observe(telemetry(PLAN, applied=unknown, time_s=6.0)))
    assert seen["applied.slack_fraction"] == 0


def test_telemetry_of_another_plan_is_refused() -> None:
    with pytest.raises(AllocationError, match="tiers"):
        Observer(PLAN).observe(telemetry(PLAN, [tier_telemetry()]))


def recorded(seen: Telemetry) -> str:
    """Telemetry as a recorder writes it: JSON, with null for no data."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(inner) for inner in value]
        return None if isinstance(value, float) and math.isnan(value) else value

    return json.dumps(plain(asdict(seen)), allow_nan=False)


def read_back(text: str) -> Telemetry:
    def number(value: object) -> object:
        return NAN if value is None else value

    content = json.loads(text)
    tiers = [{key: number(value) for key, value in tier.items()} for tier in content.pop("tiers")]
    applied = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in content.pop("applied").items()
    }
    return Telemetry(
        tiers=tuple(TierTelemetry(**tier) for tier in tiers),
        applied=Allocation(**applied),
        **{key: number(value) for key, value in content.items()},
    )


def test_serving_sees_in_recorded_telemetry_what_training_saw() -> None:
    env = AllocationEnv(episode_intervals=60)
    rng = np.random.default_rng(1)
    observation, info = env.reset(seed=5)
    trained, record = [observation], [recorded(info["telemetry"])]
    truncated = False
    while not truncated:
        action = rng.uniform(-1, 1, env.action_space.shape).astype(np.float32)
        observation, _, _, truncated, info = env.step(action)
        trained.append(observation)
        record.append(recorded(info["telemetry"]))
    serving = Observer(env.plan)
    served = [serving.observe(read_back(line)) for line in record]
    assert np.array_equal(np.array(trained), np.array(served))
    assert np.ptp(np.array(trained), axis=0).any()


ONE_TIER = """
name: one
tiers: {only: {weight: 1, pool: all, prefill_share: 1.0, targets: {tpot_ms: 50}}}
pools: {all: 1.0}
"""


def test_a_plan_of_one_tier_without_a_first_token_target() -> None:
    plan: Plan = plan_from_yaml(ONE_TIER)
    observer = Observer(plan)
    seen = named(observer, observer.observe(telemetry(plan, [tier_telemetry(ttft_ms_p99=5.0)])))
    assert seen["only.ttft_p99_known"] == 0


def test_the_digest_changes_with_the_layout_only() -> None:
    digest = observation_schema(PLAN).digest
    assert digest == observation_schema(PLAN.model_copy()).digest
    stricter = PLAN.model_copy(
        update={"prefill": PLAN.prefill.model_copy(update={"budget_tokens": 9})}
    )
    assert digest == observation_schema(stricter).digest
    assert digest != observation_schema(plan_from_yaml(ONE_TIER)).digest
