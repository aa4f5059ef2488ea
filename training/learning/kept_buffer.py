"""A replay buffer whose arrays are files, so that a kill does not lose what was seen.

Own files only, and raw arrays: nothing in them is executed when they are read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from stable_baselines3.common.buffers import ReplayBuffer

FOLDER_NAME = "replay-buffer"
_ARRAYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")


class KeptBuffer(ReplayBuffer):
    """Stable-Baselines3's replay buffer on memory-mapped files; reopened, it goes on."""

    def __init__(self, *arguments: Any, folder: str, **keywords: Any) -> None:
        """Open the files in `folder`, or make them."""
        super().__init__(*arguments, **keywords)
        kept = Path(folder) / FOLDER_NAME
        kept.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            setattr(self, name, _mapped(kept / f"{name}.raw", getattr(self, name)))
        self._place = _mapped(kept / "place.raw", np.zeros(2, np.int64))
        self.pos, self.full = int(self._place[0]), bool(self._place[1])

    def add(self, *arguments: Any, **keywords: Any) -> None:
        """Keep one step of every environment."""
        super().add(*arguments, **keywords)
        self._place[:] = self.pos, self.full


def _mapped(path: Path, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    there = path.is_file() and path.stat().st_size == like.nbytes
    return np.memmap(path, dtype=like.dtype, mode="r+" if there else "w+", shape=like.shape)
