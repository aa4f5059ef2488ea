"""What passes between the environments and the learner is looked at."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from trimtab.engine_bridge.errors import TrainingError
from trimtab.training.learning.envelope import Envelope
from trimtab.training.learning.watched_env import WatchedEnv

NAMES = ("T0.queue_length", "T0.running")


class Scripted(gymnasium.Env):
    """Gives back what it was told to."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, observation=(0.0, 0.5), reward=1.0, first=(0.0, 0.0)) -> None:
        self._observation, self._reward, self._first = observation, reward, first

    def reset(self, *, seed=None, options=None):
        return np.array(self._first, np.float32), {}

    def step(self, action):
        terms = {"goodput": self._reward, "churn": -0.5}
        observation = np.array(self._observation, np.float32)
        return observation, self._reward, False, False, {"reward_terms": terms}


def watched(*envs: Scripted) -> WatchedEnv:
    made = DummyVecEnv([lambda env=env: env for env in envs])
    return WatchedEnv(made, names=NAMES, envelope=Envelope(2))


def test_observations_are_counted_and_terms_averaged() -> None:
    env = watched(Scripted(reward=1.0), Scripted(reward=3.0))
    env.reset()
    for _ in range(4):
        env.step(np.zeros((2, 1), np.float32))
    assert env.envelope.counts.sum() == 2 * 2 * 5
    assert env.reward_terms() == {"goodput": 2.0, "churn": -0.5}
    assert env.reward_terms() == {}


def test_a_nan_names_its_feature() -> None:
    env = watched(Scripted(), Scripted(observation=(0.0, np.nan)))
    env.reset()
    with pytest.raises(TrainingError, match=r"T0\.running of environment 1 is nan"):
        env.step(np.zeros((2, 1), np.float32))


def test_the_first_observation_is_looked_at_too() -> None:
    with pytest.raises(TrainingError, match=r"T0\.queue_length"):
        watched(Scripted(first=(np.inf, 0.0))).reset()


def test_a_reward_that_is_no_number_names_its_term() -> None:
    env = watched(Scripted(reward=np.nan))
    env.reset()
    with pytest.raises(TrainingError, match="its term goodput"):
        env.step(np.zeros((1, 1), np.float32))


def test_a_diverged_policy_stops_before_the_engine() -> None:
    env = watched(Scripted())
    env.reset()
    with pytest.raises(TrainingError, match="diverged"):
        env.step(np.full((1, 1), np.nan, np.float32))
