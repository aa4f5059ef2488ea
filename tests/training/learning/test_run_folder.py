"""A run's folder: what is refused, what is kept, and checkpoints that are whole or absent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trimtab.engine_bridge.errors import FlagError
from trimtab.training.learning.envelope import Envelope
from trimtab.training.learning.run_folder import Progress, RunFolder

IDENTITY = {"seed": 1, "steps": 100}


class Model:
    """Saves its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def save(self, path: Path) -> None:
        path.write_text(self.name)

    @classmethod
    def load(cls, path: Path, *, env: object, device: str) -> Model:
        return cls(path.read_text())


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "nested" / "run")
    run.begin(IDENTITY, resume=False)
    return run


def save(run: RunFolder, name: str, step: int) -> None:
    envelope = Envelope(1)
    envelope.add(np.zeros((step, 1), np.float32))
    run.save(Model(name), envelope, Progress(step=step))


def test_the_last_checkpoint_counts(folder: RunFolder) -> None:
    assert folder.load_model(Model, None) is None
    for place, name in enumerate(("first", "second", "third"), start=1):
        save(folder, name, place)
    assert folder.load_model(Model, None).name == "third"
    assert folder.load_envelope(1).counts.sum() == 3
    assert folder.begin(IDENTITY, resume=True).step == 3
    assert len(list((folder.path / "checkpoints").iterdir())) == 1


def test_a_kill_while_saving_leaves_the_checkpoint_before(folder: RunFolder) -> None:
    save(folder, "first", 1)

    class Killed(Model):
        def save(self, path: Path) -> None:
            path.write_text("hal")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder.save(Killed("second"), Envelope(1), Progress(step=2))
    assert folder.load_model(Model, None).name == "first"
    save(folder, "third", 3)
    assert folder.load_model(Model, None).name == "third"


def test_a_kill_before_the_older_one_is_dropped_keeps_the_newer(folder: RunFolder) -> None:
    save(folder, "first", 1)
    (older,) = (folder.path / "checkpoints").iterdir()
    kept = {path.name: path.read_bytes() for path in older.iterdir()}
    save(folder, "second", 2)
    older.mkdir()
    for name, content in kept.items():
        (older / name).write_bytes(content)
    assert folder.load_model(Model, None).name == "second"
    assert folder.begin(IDENTITY, resume=True).step == 2


def test_an_unfinished_run_is_not_overwritten(folder: RunFolder) -> None:
    save(folder, "first", 1)
    with pytest.raises(FlagError, match="--resume"):
        folder.begin(IDENTITY, resume=False)
    folder.finish(folder.begin(IDENTITY, resume=True))
    assert folder.begin(IDENTITY, resume=False) == Progress()
    assert folder.load_model(Model, None) is None


def test_files_of_others_stay(folder: RunFolder) -> None:
    (folder.path / "notes.txt").write_text("mine")
    (folder.path / "policy.json").write_text("old")
    folder.begin(IDENTITY, resume=False)
    assert (folder.path / "notes.txt").read_text() == "mine"
    assert not (folder.path / "policy.json").exists()


def test_another_run_is_not_resumed(folder: RunFolder) -> None:
    save(folder, "first", 1)
    with pytest.raises(FlagError, match=r"seed: 2, must be 1"):
        folder.begin({**IDENTITY, "seed": 2}, resume=True)


def test_to_resume_nothing_is_to_begin(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "new").begin(IDENTITY, resume=True) == Progress()
