"""The environment passes the checkers of Gymnasium and Stable-Baselines3, in every form."""

from __future__ import annotations

import subprocess
import sys
import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as check_gymnasium

import trimtab.envs
from trimtab.envs.allocation_env import AllocationEnv

FORMS: list[dict[str, object]] = [
    {},
    {"render_mode": "rgb_array"},
    {"plan": "published", "engine": "h100:llama-3.1-70b-tp8"},
    {"knobs": ("weights", "shed_at"), "speeds": (0.8, 1.3), "late_probability": 0.3},
]


def make(form: dict[str, object]) -> gymnasium.Env:
    return gymnasium.make(trimtab.envs.ENVIRONMENT, episode_intervals=12, **form)


@pytest.mark.parametrize("form", FORMS)
def test_gymnasiums_checker_has_nothing_to_say(form: dict[str, object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_gymnasium(make(form).unwrapped)


@pytest.mark.parametrize("form", FORMS)
def test_stable_baselines3s_checker_has_nothing_to_say(form: dict[str, object]) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(make(form).unwrapped)


def test_make_needs_no_arguments() -> None:
    gymnasium.register_envs(trimtab.envs)
    env = gymnasium.make("trimtab/Allocation-v0")
    assert isinstance(env.unwrapped, AllocationEnv)
    observation, _ = env.reset(seed=0)
    assert env.observation_space.contains(observation)


def test_the_edges_of_the_boxes_are_inside_them() -> None:
    env = AllocationEnv()
    for space in (env.action_space, env.observation_space):
        assert space.contains(space.low)
        assert space.contains(space.high)


def test_a_vector_of_environments_steps_together() -> None:
    envs = gymnasium.make_vec(trimtab.envs.ENVIRONMENT, num_envs=2, episode_intervals=5)
    envs.reset(seed=1)
    for _ in range(7):
        observation, reward, terminated, _, _ = envs.step(envs.action_space.sample())
        assert observation.shape[0] == len(reward) == 2
        assert not np.any(terminated)


WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("gymnasium", "torch", "stable_baselines3", "matplotlib"):
            raise ModuleNotFoundError(name)

import importlib.util
known = importlib.util.find_spec
importlib.util.find_spec = lambda name, *given: None if name == "gymnasium" else known(name, *given)
sys.meta_path.insert(0, Missing())
import trimtab.envs.observation, trimtab.envs.action, trimtab.envs.features, trimtab.envs.reward
import trimtab.agents.registry
print(sorted(name for name in sys.modules if name.split(".")[0] in ("gymnasium", "numba")))
"""


def test_observations_and_actions_need_neither_gymnasium_nor_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
