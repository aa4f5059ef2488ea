"""A vector environment that looks at all that passes: counts observations, stops at non-numbers.

A NaN that reaches the network surfaces much later as an error that names nothing; here it is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from trimtab.engine_bridge.errors import TrainingError
from trimtab.training.learning.envelope import Envelope


class WatchedEnv(VecEnvWrapper):
    """Passes everything on as it is."""

    def __init__(self, env: VecEnv, *, names: Sequence[str], envelope: Envelope) -> None:
        """Watch `env`, whose observations have these `names`; count into `envelope`."""
        super().__init__(env)
        self._names = tuple(names)
        self.envelope = envelope
        self._terms: dict[str, float] = defaultdict(float)
        self._intervals = 0

    def reset(self) -> VecEnvObs:
        """Begin new episodes."""
        observations = self.venv.reset()
        self._look(observations)
        return observations

    def step_async(self, actions: npt.NDArray[np.float32]) -> None:
        """Pass actions on, if they are numbers."""
        if not np.isfinite(actions).all():
            raise TrainingError(
                "training diverged: the policy's action is not a finite number; lower the "
                "learning rate, or resume with another --seed"
            )
        self.venv.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Take what came back.

        Raises:
            TrainingError: an observation or reward is not finite; names which.
        """
        observations, rewards, dones, infos = self.venv.step_wait()
        self._look(observations)
        bad = np.flatnonzero(~np.isfinite(rewards))
        if len(bad):
            terms = infos[bad[0]].get("reward_terms", {})
            wrong = [name for name, value in terms.items() if not np.isfinite(value)]
            raise TrainingError(
                f"the reward of environment {bad[0]} is {rewards[bad[0]]}"
                + (f": its term {', '.join(wrong)}" if wrong else "")
            )
        self._intervals += len(infos)
        for info in infos:
            for name, value in info.get("reward_terms", {}).items():
                self._terms[name] += value
        return observations, rewards, dones, infos

    def reward_terms(self) -> dict[str, float]:
        """Mean of each reward term an interval since the last call."""
        means = {name: total / self._intervals for name, total in self._terms.items()}
        self._terms.clear()
        self._intervals = 0
        return means

    def _look(self, observations: VecEnvObs) -> None:
        rows = np.asarray(observations)
        if not np.isfinite(rows).all():
            row, place = np.argwhere(~np.isfinite(rows))[0]
            raise TrainingError(
                f"observation {self._names[place]} of environment {row} is {rows[row, place]}; "
                "it must be a finite number"
            )
        self.envelope.add(rows)
