"""What a training run is asked to do, as one value: all that must be equal for an equal result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.training.learning.scenarios import Randomisation


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of a run; with the traces, the plan and the engine they determine the bundle."""

    steps: int
    """Environment steps, one control interval of one engine each; rounded up to whole rollouts."""
    seed: int
    """Of everything that is drawn."""
    algorithm: str = "PPO"
    """Name of an algorithm of Stable-Baselines3 with a continuous deterministic actor."""
    envs: int = 8
    """Environments that step together. More decorrelate a rollout, fewer make it longer."""
    rollout_steps: int = 256
    """Steps of each environment between two updates, for on-policy algorithms; all of them also
    write a checkpoint after so many."""
    window_s: float = 600.0
    """Length of an episode, seconds. Shorter than the longest target, and its misses go unseen."""
    validate_every_steps: int = 16_384
    """Steps between two paired evaluations against the static plan."""
    validation_runs: int = 8
    """Windows that each of them plays; where there are fewer, each in several variations."""
    randomisation: Randomisation = field(default_factory=Randomisation)
    """How far an episode may stray from what was recorded."""

    def content(self) -> dict[str, Any]:
        """The settings as JSON holds them, nested ones with a dot in the name."""
        flat: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                flat |= {f"{name}.{key}": inner for key, inner in value.items()}
            else:
                flat[name] = value
        return dict(json.loads(json.dumps(flat)))
