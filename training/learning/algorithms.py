"""Which algorithms can be chosen, with settings that suit a residual action every few seconds.

Networks are two layers of 64 with tanh, so that every actor becomes a bundle (`export`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.engine_bridge.errors import FlagError, did_you_mean
from trimtab.training.learning.settings import TrainSettings

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm
    from stable_baselines3.common.vec_env import VecEnv

LAYERS = [64, 64]
LOG_STD_INIT = -1.3
"""Of A2C's Gaussian: at 0 a third of all samples would be clipped."""
SDE_LOG_STD_INIT = -2.3
"""Of PPO's exploration matrix (gSDE, arXiv 2005.05719): over 64 hidden units it comes to actions
that stray as far as with `LOG_STD_INIT`."""
_SDE_INTERVALS = 15
GAMMA = 0.97
"""Per interval: with 2 s a horizon of a minute, about the time that a queue takes to drain."""
FIRST_ACTION_GAIN = 0.01
"""The actor's last layer begins so small that the untrained policy is the static plan."""
_LEARNING_RATE = 3e-4
_BUFFER_STEPS = 200_000

_ON_POLICY = ("PPO", "A2C")
_OFF_POLICY = ("SAC", "TD3", "DDPG")
ALGORITHMS = _ON_POLICY + _OFF_POLICY
"""Those of Stable-Baselines3 with a continuous, deterministic actor."""


def algorithm_name(given: str) -> str:
    """The algorithm's name in its own spelling.

    Raises:
        FlagError: it does not exist, or its policy cannot be exported.
    """
    by_folded = {name.casefold(): name for name in ALGORITHMS}
    if given.casefold() not in by_folded:
        discrete = "it has discrete actions, these are continuous" if given.upper() == "DQN" else ""
        raise FlagError(
            "--algorithm",
            value=given,
            bound=f"one of {', '.join(ALGORITHMS)}",
            remedy=discrete or did_you_mean(given, ALGORITHMS),
        )
    return by_folded[given.casefold()]


def hyperparameters(settings: TrainSettings) -> dict[str, Any]:
    """The algorithm's own settings, as they are recorded; without schedules and classes."""
    rollout = settings.rollout_steps
    match settings.algorithm:
        case "PPO":
            return {
                "n_steps": rollout,
                "batch_size": min(512, rollout * settings.envs),
                "n_epochs": 5,
                "gae_lambda": 0.9,
                "target_kl": 0.03,
                # What a knob does shows after a while: each deviation is held for half a minute.
                # Fresh noise in every interval would average out and be paid for as churn.
                "use_sde": True,
                "sde_sample_freq": _SDE_INTERVALS,
                "gamma": GAMMA,
                "learning_rate": _LEARNING_RATE,
                "max_grad_norm": 0.5,
            }
        case "A2C":
            return {
                "n_steps": min(rollout, 16),
                "gae_lambda": 0.9,
                "gamma": GAMMA,
                "learning_rate": _LEARNING_RATE,
                "max_grad_norm": 0.5,
            }
    off_policy = {
        "batch_size": 256,
        "buffer_size": min(_BUFFER_STEPS, max(settings.steps, settings.envs)),
        "learning_starts": min(2048, settings.steps // 2),
        "train_freq": 8,
        "gradient_steps": 8,
        "tau": 0.005,
        "gamma": GAMMA,
        "learning_rate": _LEARNING_RATE,
    }
    return off_policy


def make_model(settings: TrainSettings, env: VecEnv, *, folder: Path) -> BaseAlgorithm:
    """A new model; its mean action is near zero everywhere, which is the static plan.

    Args:
        settings: algorithm, seed and sizes.
        env: what it learns from.
        folder: where an off-policy algorithm keeps what it has seen.
    """
    import stable_baselines3
    from torch import nn

    keywords = hyperparameters(settings)
    keywords["learning_rate"] = FallingRate(keywords["learning_rate"])
    architecture: dict[str, Any] = {"net_arch": LAYERS, "activation_fn": nn.Tanh}
    if settings.algorithm in _ON_POLICY:
        sde = keywords.get("use_sde", False)
        architecture["log_std_init"] = SDE_LOG_STD_INIT if sde else LOG_STD_INIT
    else:
        from trimtab.training.learning.kept_buffer import KeptBuffer

        keywords["replay_buffer_class"] = KeptBuffer
        keywords["replay_buffer_kwargs"] = {"folder": str(folder)}
        if settings.algorithm in ("TD3", "DDPG"):
            keywords["action_noise"] = _noise(env)
    model: BaseAlgorithm = getattr(stable_baselines3, settings.algorithm)(
        "MlpPolicy", env, seed=settings.seed, device="cpu", policy_kwargs=architecture, **keywords
    )
    if settings.algorithm in _OFF_POLICY:
        _begin_at_zero(model)
    return model


class FallingRate:
    """A learning rate that falls to zero with the remaining share of the run."""

    def __init__(self, first: float) -> None:
        """Begin at `first`."""
        self.first = first

    def __call__(self, remaining: float) -> float:
        """The rate while `remaining` of the run, in [0, 1], is left."""
        return self.first * remaining


def _noise(env: VecEnv) -> Any:
    import numpy as np
    from stable_baselines3.common.noise import NormalActionNoise, VectorizedActionNoise

    size = env.action_space.shape[0]
    one = NormalActionNoise(np.zeros(size), np.full(size, 0.2))
    return VectorizedActionNoise(one, env.num_envs)


def _begin_at_zero(model: BaseAlgorithm) -> None:
    import torch
    from torch import nn

    for actor in (model.policy.actor, getattr(model.policy, "actor_target", None)):
        if actor is None:
            continue
        last = [module for module in actor.modules() if isinstance(module, nn.Linear)]
        with torch.no_grad():
            for module in last:
                if module.out_features == model.action_space.shape[0]:
                    module.weight *= FIRST_ACTION_GAIN
                    module.bias *= FIRST_ACTION_GAIN
