"""The environment as a whole: zero is static, episodes end in time, faults say what is off."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import pytest

from trimtab.agents.static import StaticPolicy
from trimtab.engine_bridge import limits
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.errors import ActionError, EpisodeError, PlanError, TraceError
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.replay.engine import ReplayEngine
from trimtab.engine_bridge.trace import Trace
from trimtab.envs.allocation_env import AllocationEnv
from trimtab.envs.poisson_traffic import PoissonTraffic
from trimtab.envs.reward import RewardSettings
from trimtab.training.traces.generate import generate
from trimtab.training.whatif import metrics
from trimtab.training.whatif.run import default_drain_s, drive

ENGINE = "h100:llama-3.1-8b-tp1"
SPEC = get_engine_spec(ENGINE)
PLAN = load_plan()
STATIC = Allocation.static(PLAN)


@cache
def traffic() -> Trace:
    """Five minutes of chats, agents and batch, sessions among them, that overload the engine."""
    return generate(hours=1 / 12, seed=4, preset="steady", load=1.1, spec=SPEC)


def make(**settings: Any) -> AllocationEnv:
    return AllocationEnv(**{"traces": traffic(), "engine": SPEC, **settings})


def zeros(env: AllocationEnv) -> np.ndarray:
    return np.zeros(env.action_space.shape, np.float32)


def play(env: AllocationEnv, seed: int = 0, **options: Any) -> list[tuple[np.ndarray, float, dict]]:
    """A whole episode under a random walk of actions."""
    env.reset(seed=seed, options=options or None)
    rng = np.random.default_rng(seed)
    action, found, truncated = zeros(env), [], False
    while not truncated:
        stride = rng.normal(scale=0.2, size=action.shape)
        action = np.clip(action + stride, -1, 1).astype(np.float32)
        observation, reward, terminated, truncated, info = env.step(action)
        assert not terminated
        found.append((observation, reward, info))
    return found


def test_an_episode_of_zeros_is_the_static_what_if_bit_for_bit() -> None:
    env = make(drain_s=default_drain_s(PLAN))
    env.reset()
    rewards, truncated, info = [], False, {}
    while not truncated:
        _, reward, _, truncated, info = env.step(zeros(env))
        rewards.append(reward)
    static = drive(
        traffic(),
        StaticPolicy(),
        PLAN,
        SPEC,
        seed=0,
        drain_s=default_drain_s(PLAN),
    )
    assert env._episode.engine.result().digest() == static.digest()
    assert set(rewards) == {0.0}
    by = metrics.yardstick(traffic(), PLAN)
    expected = metrics.score.weighted_attainment(by.demand, metrics.judge(static, by).met.every)
    assert info["weighted_attainment"] == expected


@pytest.mark.parametrize("interval_s", [2.0, 0.7])
def test_the_twin_takes_away_exactly_what_the_static_plan_earns(interval_s: float) -> None:
    controller = PLAN.controller.model_copy(update={"interval_s": interval_s})
    env = make(plan=PLAN.model_copy(update={"controller": controller}), episode_intervals=40)
    env.reset()
    earned = 0.0
    for _ in range(40):
        _, reward, _, _, info = env.step(zeros(env))
        assert reward == 0.0
        earned += info["reward_terms"]["goodput"]
    assert earned > 0


def test_the_terms_add_up_to_the_reward_and_the_goodput_to_the_score() -> None:
    env = make()
    run = play(env)
    for _, reward, info in run:
        assert reward == pytest.approx(sum(info["reward_terms"].values()))
    served = sum(info["reward_terms"]["goodput"] for _, _, info in run)
    intervals = traffic().duration_s / PLAN.controller.interval_s
    # The interval before the first action is in the score too, and sessions outlast the trace.
    assert served / intervals == pytest.approx(run[-1][2]["weighted_attainment"], abs=0.02)


def test_moving_knobs_costs_churn_and_reaching_too_far_costs_gap() -> None:
    env = make(reward=RewardSettings(churn=1.0, gap=1.0))
    env.reset()
    _, _, _, _, info = env.step(np.ones_like(zeros(env)))
    assert info["reward_terms"]["churn"] < 0
    assert info["reward_terms"]["gap"] < 0
    assert info["requested"] != info["applied"]
    assert info["applied"] == limits.project(info["requested"], STATIC, PLAN).allocation


def test_the_applied_allocation_is_in_the_next_observation() -> None:
    env = make()
    env.reset()
    action = np.ones_like(zeros(env))
    observation, _, _, _, info = env.step(action)
    seen = dict(zip(env.observation_schema.names, observation.tolist(), strict=True))
    factor = info["applied"].prefill_budget_tokens / STATIC.prefill_budget_tokens
    assert factor > 1
    assert seen["applied.prefill_budget_tokens"] == pytest.approx(np.log10(factor), rel=1e-5)


def test_an_episode_has_so_many_steps() -> None:
    assert len(play(make(episode_intervals=17))) == 17


def test_an_episode_ends_when_nothing_is_left_to_serve() -> None:
    run = play(make())
    last = run[-1][2]["telemetry"]
    assert sum(tier.running + tier.queue_length for tier in last.tiers) == 0
    assert "weighted_attainment" not in run[-2][2]


def test_an_episode_ends_after_its_drain() -> None:
    run = play(make(drain_s=10.0))
    limit_s = traffic().duration_s + 10.0
    assert limit_s <= run[-1][2]["time_s"] < limit_s + 2 * PLAN.controller.interval_s


def test_equal_seeds_give_equal_episodes_and_others_do_not() -> None:
    def outline(seed: int) -> list[bytes]:
        env = AllocationEnv(episode_intervals=15, speeds=(0.7, 1.4), late_probability=0.2)
        return [observation.tobytes() for observation, _, _ in play(env, seed)]

    assert outline(1) == outline(1)
    assert outline(1) != outline(2)


def test_an_episode_remembers_nothing_of_the_one_before() -> None:
    used = make()
    # Some first intervals end later than the one before, which is then no restart to see.
    for speed in (1.0, 1.3, 0.9, 1.2, 1.1):
        again, _ = used.reset(options={"speed": speed})
        alone, _ = make().reset(options={"speed": speed})
        assert np.array_equal(again, alone)


def test_reset_plays_the_trace_and_speed_that_it_is_given() -> None:
    short = traffic().head(40)
    env = make(traces={"long": traffic(), "short": short}, speeds=(0.5, 2.0))
    _, info = env.reset(options={"trace": "short", "speed": 1.25})
    assert (info["trace"], info["speed"], info["twin"]) == ("short", 1.25, True)
    assert env._episode.trace is short
    _, info = env.reset(options={"trace": traffic().head(30)})
    assert len(env._episode.trace) == 30
    assert 0.5 <= info["speed"] <= 2.0
    names = {env.reset(seed=seed)[1]["trace"] for seed in range(12)}
    assert names == {"long", "short"}


def test_a_slower_engine_serves_less() -> None:
    def decoded(speed: float) -> int:
        run = play(make(episode_intervals=60), speed=speed)
        return sum(tier.decode_tokens for _, _, info in run for tier in info["telemetry"].tiers)

    assert decoded(2.0) < decoded(1.0)


def test_late_telemetry_is_seen_again_and_older() -> None:
    late, prompt = make(late_probability=0.5), make()
    at = late.observation_schema.names.index("engine.age")
    ages = [observation[at] for observation, _, _ in play(late)]
    assert 0.3 < np.mean(np.array(ages) > 0) < 0.7
    assert max(ages) > 1.5 * PLAN.controller.interval_s / PLAN.controller.lease_s
    assert not any(observation[at] for observation, _, _ in play(prompt))


def test_any_engine_may_stand_in_and_then_there_is_no_twin() -> None:
    made = []

    def engines(trace: Trace, speed: float) -> ReplayEngine:
        made.append((len(trace), speed))
        return ReplayEngine(trace, PLAN, SPEC, rules="fcfs", speed=speed)

    env = make(engines=engines, episode_intervals=10)
    _, info = env.reset(options={"speed": 1.5})
    assert made == [(len(traffic()), 1.5)]
    assert info["twin"] is False
    _, _, _, _, info = env.step(zeros(env))
    assert info["reward_terms"]["twin"] == 0.0


@pytest.mark.parametrize("bad", [np.zeros(2), np.full(17, np.nan), None, "zero"])
def test_an_action_that_is_none_is_refused_and_the_episode_goes_on(bad: object) -> None:
    env = make()
    env.reset()
    with pytest.raises(ActionError, match="action"):
        env.step(bad)
    env.step(zeros(env))


def test_step_needs_an_episode() -> None:
    env = make(episode_intervals=1)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(zeros(env))
    env.reset()
    env.step(zeros(env))
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(zeros(env))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"traces": "day.parquet"}, r'traces: "day\.parquet".*read_trace'),
        ({"traces": {}}, "traces"),
        ({"episode_intervals": 0}, "episode_intervals: 0, must be at least 1"),
        ({"speeds": (1.2, 0.8)}, "speeds"),
        ({"speeds": (0.0, 1.0)}, "speeds"),
        ({"drain_s": float("nan")}, "drain_s"),
        ({"late_probability": 1.0}, "late_probability"),
        ({"render_mode": "human"}, "render_mode"),
    ],
)
def test_settings_out_of_bounds_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(EpisodeError, match=told):
        make(**settings)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tarce": "day"}, 'did you mean "trace"'),
        ({"trace": "nigth"}, 'did you mean "night"'),
        ({"trace": 7}, "trace: 7"),
        ({"speed": 0.0}, "speed: 0.0, must be a number above 0"),
        ({"speed": "fast"}, "speed"),
    ],
)
def test_options_that_are_not_known_are_refused(options: dict[str, Any], told: str) -> None:
    env = make(traces={"day": traffic(), "night": traffic()})
    with pytest.raises(EpisodeError, match=told):
        env.reset(options=options)


def test_traffic_of_other_tiers_is_refused() -> None:
    alien = replace(traffic(), tier_names=("gold", "silver", "bronze", "T3"))
    with pytest.raises((TraceError, PlanError), match="gold"):
        make().reset(options={"trace": alien})


def test_poisson_traffic_loads_the_engine_as_it_says() -> None:
    source = PoissonTraffic(PLAN, SPEC)
    first = source.draw(np.random.default_rng(1))
    assert first.digest() == source.draw(np.random.default_rng(1)).digest()
    assert first.digest() != source.draw(np.random.default_rng(2)).digest()
    engine = ReplayEngine(first, PLAN, SPEC)
    engine.run(interval_s=2.0, until_s=first.duration_s)
    seen = engine.result().telemetry
    assert np.mean([interval.busy_fraction for interval in seen]) > 0.9


def test_the_picture_shows_the_episode() -> None:
    pytest.importorskip("matplotlib")
    env = make(render_mode="rgb_array", episode_intervals=8)
    assert env.render() is None
    env.reset()
    before = env.render()
    for _ in range(8):
        env.step(np.ones_like(zeros(env)))
    after = env.render()
    assert after.dtype == np.uint8
    assert after.ndim == 3
    assert after.shape[2] == 3
    assert (before != after).any()
    assert make().render() is None


def test_a_picture_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else known(name)
    )
    with pytest.raises(EpisodeError, match=r"matplotlib.*pip install 'trimtab\[train\]'"):
        make(render_mode="rgb_array")


def test_an_engine_is_let_go_with_its_episode() -> None:
    closed: list[int] = []

    class Connected(ReplayEngine):
        def close(self) -> None:
            closed.append(id(self))

    def engines(trace: Trace, speed: float) -> ReplayEngine:
        return Connected(trace, load_plan(), SPEC, speed=speed)

    env = AllocationEnv(engines=engines, episode_intervals=2)
    env.reset(seed=1)
    assert closed == []
    env.reset(seed=2)
    assert len(closed) == 1
    env.close()
    env.close()
    assert len(set(closed)) == 2
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(np.zeros(env.action_space.shape, np.float32))
