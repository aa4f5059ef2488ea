"""Algorithms by name, and their actors as plain layers."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import numpy as np
import pytest
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import nn

from trimtab.agents.learned import forward
from trimtab.engine_bridge.errors import FlagError, TrainingError
from trimtab.training.learning.algorithms import ALGORITHMS, algorithm_name, make_model
from trimtab.training.learning.export import actor_layers
from trimtab.training.learning.kept_buffer import KeptBuffer
from trimtab.training.learning.settings import TrainSettings

SIZE, ACTIONS = 7, 3


class Drifting(gymnasium.Env):
    """A state that the action pushes; it is best kept at zero."""

    observation_space = gymnasium.spaces.Box(-1, 1, (SIZE,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (ACTIONS,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._state = self.np_random.uniform(-1, 1, SIZE).astype(np.float32)
        return self._state, {}

    def step(self, action):
        pushed = self._state + 0.1 * np.resize(action, SIZE)
        self._state = np.clip(pushed, -1, 1).astype(np.float32)
        return self._state, float(-np.abs(self._state).sum()), False, False, {}


def trained(algorithm: str, folder: Path, steps: int = 300) -> BaseAlgorithm:
    settings = TrainSettings(steps=steps, seed=4, algorithm=algorithm, envs=2, rollout_steps=32)
    model = make_model(settings, DummyVecEnv([Drifting, Drifting]), folder=folder)
    return model.learn(steps) if steps else model


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_layers_compute_what_the_actor_predicts(algorithm: str, tmp_path: Path) -> None:
    model = trained(algorithm, tmp_path)
    layers = actor_layers(model)
    observations = np.random.default_rng(0).uniform(-1, 1, (500, SIZE)).astype(np.float32)
    expected, _ = model.predict(observations, deterministic=True)
    np.testing.assert_allclose(forward(layers, observations), expected, atol=1e-5)
    assert np.abs(expected).max() > 0.02, "the actor never moved: it tests nothing"
    assert all(weights.dtype == biases.dtype == np.float32 for weights, biases in layers)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_untrained_actor_is_nearly_zero(algorithm: str, tmp_path: Path) -> None:
    layers = actor_layers(trained(algorithm, tmp_path, steps=0))
    observations = np.random.default_rng(0).uniform(-1, 1, (500, SIZE)).astype(np.float32)
    assert np.abs(forward(layers, observations)).max() < 0.05


@pytest.mark.parametrize("algorithm", ["PPO", "A2C", "SAC"])
def test_equal_seeds_give_equal_actors(algorithm: str, tmp_path: Path) -> None:
    first, again = (trained(algorithm, tmp_path / str(n)) for n in (1, 2))
    for (weights, _), (other, _) in zip(actor_layers(first), actor_layers(again), strict=True):
        np.testing.assert_array_equal(weights, other)


def test_another_activation_is_refused(tmp_path: Path) -> None:
    model = trained("PPO", tmp_path, steps=0)
    model.policy.mlp_extractor.policy_net[1] = nn.ReLU()
    with pytest.raises(TrainingError, match="ReLU"):
        actor_layers(model)


def test_a_replay_buffer_outlives_its_process(tmp_path: Path) -> None:
    model = trained("SAC", tmp_path)
    model.save(tmp_path / "model.zip")
    seen = model.replay_buffer
    loaded = type(model).load(tmp_path / "model.zip", env=model.env)
    again = loaded.replay_buffer
    assert isinstance(again, KeptBuffer)
    assert (again.pos, again.full) == (seen.pos, seen.full)
    assert again.pos > 0
    np.testing.assert_array_equal(again.observations, seen.observations)


def test_names_are_forgiving() -> None:
    assert algorithm_name("ppo") == "PPO"
    assert algorithm_name("Sac") == "SAC"


@pytest.mark.parametrize(
    ("given", "hint"), [("PP0", 'did you mean "PPO"'), ("DQN", "discrete"), ("TRPO", "PPO, A2C")]
)
def test_unknown_and_unfit_ones_are_refused(given: str, hint: str) -> None:
    with pytest.raises(FlagError, match="--algorithm") as caught:
        algorithm_name(given)
    assert hint in str(caught.value)
