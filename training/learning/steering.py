"""What happens beside learning: checkpoints, validation, the bar, and the end before the end.

Stable-Baselines3 calls it back; between two rollouts the policy is the one that the last update
made, so that is when it is saved and validated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter

from trimtab.training.learning.progress_bar import ProgressBar
from trimtab.training.learning.run_folder import Progress, RunFolder
from trimtab.training.learning.run_log import RunLog
from trimtab.training.learning.settings import TrainSettings
from trimtab.training.learning.tracking import Tracking
from trimtab.training.learning.validation import Validation, Validator
from trimtab.training.learning.watched_env import WatchedEnv

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

_LEFT_OUT = ("time/iterations",)


class Steering(BaseCallback):
    """Saves, validates and keeps the best policy; stops when it is told to."""

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        settings: TrainSettings,
        *,
        env: WatchedEnv,
        validator: Validator,
        write: Callable[[BaseAlgorithm, Path, Progress], object],
        tracking: Tracking,
        bar: ProgressBar,
        stopping: Callable[[], bool],
    ) -> None:
        """Take the run's parts.

        Args:
            folder: the run's files.
            progress: how far it has come; kept up to date.
            settings: how often to do what.
            env: the environments, for their reward terms and observations.
            validator: plays policies against the static plan.
            write: writes a model's policy as a bundle into a folder.
            tracking: the run's record.
            bar: what the user sees.
            stopping: whether to stop at the next step.
        """
        super().__init__()
        self._folder = folder
        self._progress = progress
        self._settings = settings
        self._env = env
        self._validator = validator
        self._write = write
        self._tracking = tracking
        self._bar = bar
        self._stopping = stopping
        self._chunk = settings.rollout_steps * settings.envs
        self._next_validation = max(progress.validated_step, 0) + settings.validate_every_steps
        self.last: Validation | None = None
        """The validation of the best policy, if it was made by this process."""

    def validate(self) -> None:
        """Play the policy of the moment, and keep it if it is the best."""
        step = self._progress.step = int(self.num_timesteps)
        self._write(self.model, self._folder.candidate, self._progress)
        validation = self._validator.validate(self._folder.candidate)
        self._progress.validated_step = step
        self._tracking.log.metrics(step, validation.metrics())
        low = validation.low
        best = self._progress.best_low
        # A comparison with NaN is false: where nothing was demanded the newest policy is kept.
        if best is None or not low <= best:
            self._write(self.model, self._folder.best, self._progress)
            self._progress.best_step = step
            self._progress.best_low = low if low == low else None
            self.last = validation
        self._bar.note(
            f"gain {100 * validation.gain:+.2f} pp (at least {100 * low:+.2f}), "
            f"best at {self._progress.best_step:,}"
        )

    def save(self) -> None:
        """Write a checkpoint."""
        self._progress.step = int(self.num_timesteps)
        self._folder.save(self.model, self._env.envelope, self._progress)
        self._tracking.log.metrics(self._progress.step, self._terms())
        self._tracking.watch()

    def _on_rollout_start(self) -> None:
        step = int(self.num_timesteps)
        if step >= self._next_validation:
            self.validate()
            self._next_validation = step + self._settings.validate_every_steps
            self.save()
        elif step - self._progress.step >= self._chunk:
            self.save()

    def _on_step(self) -> bool:
        self._bar.show(int(self.num_timesteps))
        return not self._stopping()

    def _terms(self) -> dict[str, float]:
        return {f"reward/{name}": mean for name, mean in self._env.reward_terms().items()}


class LogWriter(KVWriter):
    """Hands what Stable-Baselines3 reports to the run's log, all figures of a step in one entry."""

    def __init__(self, log: RunLog) -> None:
        """Write to `log`."""
        self._log = log

    def write(
        self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0
    ) -> None:
        """One report."""
        figures = {
            name: float(value)
            for name, value in key_values.items()
            if name not in _LEFT_OUT and isinstance(value, (int, float, np.number))
        }
        self._log.metrics(step, figures)

    def close(self) -> None:
        """Nothing is open."""
