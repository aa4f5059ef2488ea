"""The folder of a run: what it was asked to do, its checkpoints, its best policy so far.

A checkpoint appears whole or not at all, so that a kill at any moment loses at most what came after
the last one. Checkpoints hold Stable-Baselines3's own file, which is a pickle: only a folder that
this machine's user trained in is to be resumed. What others read is the bundle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.engine_bridge.atomic import write_text
from trimtab.engine_bridge.errors import FlagError
from trimtab.training.learning.envelope import Envelope
from trimtab.training.learning.kept_buffer import FOLDER_NAME as BUFFER_FOLDER
from trimtab.training.learning.run_log import LOG_NAME
from trimtab.training.learning.uploader import STATE_NAME as UPLOAD_STATE

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

IDENTITY_NAME, PROGRESS_NAME = "run.json", "progress.json"
_CHECKPOINTS, _MODEL, _COUNTS = "checkpoints", "model.zip", "envelope.npz"
BEST_FOLDER, CANDIDATE_FOLDER = "best", "candidate"
_OWN = (
    *(IDENTITY_NAME, LOG_NAME, UPLOAD_STATE, _CHECKPOINTS, BEST_FOLDER, CANDIDATE_FOLDER),
    *(BUFFER_FOLDER, "policy.json", "policy.npz", "inputs", "evaluation.json", "tracking.log"),
)


@dataclass(kw_only=True)
class Progress:
    """How far a run has come."""

    step: int = 0
    validated_step: int = -1
    """Step of the last validation; -1 before the first."""
    best_step: int = -1
    """Step of the policy in `best`; -1 before the first validation."""
    best_low: float | None = None
    """Lower end of the 95 % interval of its gain over static; None where nothing was demanded."""
    finished: bool = False


class RunFolder:
    """One run's files."""

    def __init__(self, path: Path) -> None:
        """Name the folder; nothing is touched yet."""
        self.path = path
        self.best = path / BEST_FOLDER
        self.candidate = path / CANDIDATE_FOLDER

    def begin(self, identity: Mapping[str, Any], *, resume: bool) -> Progress:
        """Make the folder ready for a new run, or find where an earlier one stopped.

        Args:
            identity: all that determines the result, as JSON holds it.
            resume: go on with what is there, if anything is.

        Raises:
            FlagError: an unfinished run would be lost, or another run is to be resumed.
        """
        before = self._identity()
        progress = self._progress()
        if before is not None and resume:
            self._check_same(before, identity)
            return progress
        if before is not None and self._checkpoints() and not progress.finished:
            raise FlagError(
                "--out",
                value=str(self.path),
                bound="without an unfinished run",
                remedy="add --resume to go on with it, or give another folder",
            )
        for name in _OWN:
            path = self.path / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / IDENTITY_NAME, json.dumps(identity, indent=2) + "\n")
        return Progress()

    def save(self, model: BaseAlgorithm, envelope: Envelope, progress: Progress) -> None:
        """Write a checkpoint and drop the one before."""
        folder = self.path / _CHECKPOINTS
        older = self._checkpoints()
        part = folder / "part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        model.save(part / _MODEL)
        np.savez(part / _COUNTS, counts=envelope.counts)
        write_text(part / PROGRESS_NAME, json.dumps(asdict(progress)) + "\n")
        target = folder / f"{len(older) and int(older[-1].name) + 1:08d}"
        os.replace(part, target)
        for path in older:
            shutil.rmtree(path)

    def load_model(self, kind: type[BaseAlgorithm], env: Any) -> BaseAlgorithm | None:
        """The model of the last checkpoint; None without one."""
        found = self._checkpoints()
        return kind.load(found[-1] / _MODEL, env=env, device="cpu") if found else None

    def load_envelope(self, size: int) -> Envelope:
        """What was counted until the last checkpoint, or nothing yet."""
        found = self._checkpoints()
        if not found:
            return Envelope(size)
        with np.load(found[-1] / _COUNTS, allow_pickle=False) as file:
            return Envelope.of(file["counts"])

    def finish(self, progress: Progress) -> None:
        """Mark the run as done; what only a resumption needs goes."""
        found = self._checkpoints()
        if found:
            progress.finished = True
            write_text(found[-1] / PROGRESS_NAME, json.dumps(asdict(progress)) + "\n")
        for name in (BUFFER_FOLDER, CANDIDATE_FOLDER):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def _identity(self) -> dict[str, Any] | None:
        try:
            text = (self.path / IDENTITY_NAME).read_text(encoding="utf-8")
            return dict(json.loads(text))
        except (OSError, ValueError):
            return None

    def _progress(self) -> Progress:
        found = self._checkpoints()
        if not found:
            return Progress()
        return Progress(**json.loads((found[-1] / PROGRESS_NAME).read_text(encoding="utf-8")))

    def _checkpoints(self) -> list[Path]:
        folder = self.path / _CHECKPOINTS
        return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())

    def _check_same(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                raise FlagError(
                    "--resume",
                    key=key,
                    value=now.get(key),
                    bound=f"{before.get(key)!r}, as in {self.path / IDENTITY_NAME}",
                    remedy="repeat the command line of the run, or begin one in another folder",
                )
