"""The environments that training steps together: `Allocation-v0`, each episode another scenario.

It draws and hands on; what an episode is worth is the environment's own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import DummyVecEnv

from trimtab.engine_bridge.engine_spec import EngineSpec
from trimtab.engine_bridge.plan import Plan
from trimtab.envs.allocation_env import AllocationEnv
from trimtab.training.learning.scenarios import Randomisation, ScenarioSource, Span

Float32Array = npt.NDArray[np.float32]
_KEPT_INFO = ("reward_terms", "weighted_attainment")


class ScenarioEnv(gymnasium.Wrapper[Float32Array, Float32Array, Float32Array, Float32Array]):
    """Begins every episode with a scenario of its own source."""

    def __init__(
        self, env: AllocationEnv, source: ScenarioSource, rng: np.random.Generator
    ) -> None:
        """Draw scenarios for `env` from `source` with `rng`."""
        super().__init__(env)
        self._source = source
        self._rng = rng

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float32Array, dict[str, Any]]:
        """Begin an episode; seed and options are not used, the source decides."""
        scenario = self._source.draw(self._rng)
        observation, _ = self.env.reset(
            seed=scenario.seed, options={"trace": scenario.trace, "speed": scenario.speed}
        )
        return observation, {}

    def step(self, action: Float32Array) -> tuple[Float32Array, float, bool, bool, dict[str, Any]]:
        """One interval. Of the information only what training records is kept."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        kept = {name: info[name] for name in _KEPT_INFO if name in info}
        return observation, float(reward), terminated, truncated, kept


def make_env(plan: Plan, spec: EngineSpec, *, intervals: int, late: float) -> AllocationEnv:
    """One environment without traffic of its own."""
    return AllocationEnv(plan=plan, engine=spec, episode_intervals=intervals, late_probability=late)


def make_envs(
    spans: Sequence[Span],
    *,
    plan: Plan,
    spec: EngineSpec,
    window_s: float,
    randomisation: Randomisation,
    count: int,
    seed: Sequence[int],
) -> DummyVecEnv:
    """`count` environments that step together, each with random numbers of its own.

    Args:
        spans: where windows may be cut from.
        plan: the plan whose knobs are learned.
        spec: the engine that is replayed.
        window_s: length of an episode, seconds.
        randomisation: how far an episode may stray.
        count: how many.
        seed: of what is drawn; equal seeds give equal scenarios.
    """
    source = ScenarioSource(spans, length_s=window_s, randomisation=randomisation)
    intervals = max(1, round(window_s / plan.controller.interval_s))

    def maker(number: int) -> ScenarioEnv:
        env = make_env(plan, spec, intervals=intervals, late=randomisation.late_probability)
        return ScenarioEnv(env, source, np.random.default_rng([*seed, number]))

    return DummyVecEnv([lambda number=number: maker(number) for number in range(count)])
