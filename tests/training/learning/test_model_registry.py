"""Names of registered models, on a real registry in SQLite."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from trimtab.agents.bundle import read_bundle
from trimtab.engine_bridge.errors import ModelError
from trimtab.training.learning.model_registry import (
    CHAMPION,
    DIGEST_TAG,
    ModelRegistry,
    Version,
    resolve_policy,
)
from trimtab.training.learning.run_log import RunLog
from trimtab.training.learning.uploader import Uploader, UploadState


@pytest.fixture
def registered(tracking_uri: str, bundle: Path, tmp_path: Path) -> Version:
    """The first version of the model `chat`."""
    return register(tracking_uri, bundle, tmp_path / "run")


def register(uri: str, bundle: Path, folder: Path) -> Version:
    folder.mkdir()
    for name in ("policy.json", "policy.npz"):
        shutil.copyfile(bundle / name, folder / name)
    log = RunLog(folder, wall_s=lambda: 1.0)
    for name in ("policy.json", "policy.npz"):
        log.artifact(name, under="bundle")
    log.end("FINISHED")
    uploader = Uploader(folder, UploadState(uri=uri, experiment="x"))
    uploader.copy()
    digest = read_bundle(bundle).digest
    return ModelRegistry(uri).register(
        "chat", run_id=uploader.state.run_id, tags={DIGEST_TAG: digest}
    )


def test_a_version_is_found_by_number_newest_and_alias(
    registered: Version, tracking_uri: str, bundle: Path
) -> None:
    registry = ModelRegistry(tracking_uri)
    registry.move_alias(registered, CHAMPION, tags={"gate": "passed"})
    for name in ("models:/chat/1", "models:/chat/latest", "models:/chat@champion"):
        kind, _, folder = resolve_policy(name).partition(":")
        assert kind == "bundle"
        assert read_bundle(Path(folder)).digest == read_bundle(bundle).digest
    assert registry.holder("chat", CHAMPION) == "1"
    tags = registry.find("chat", alias=CHAMPION).tags
    assert tags["promoted_from"] == "none"
    assert tags["gate"] == "passed"
    assert tags["promoted_by"]
    assert tags["promoted_at"].startswith("20")


def test_a_moved_alias_says_where_it_was(
    registered: Version, tracking_uri: str, bundle: Path, tmp_path: Path
) -> None:
    registry = ModelRegistry(tracking_uri)
    registry.move_alias(registered, CHAMPION, tags={})
    second = register(tracking_uri, bundle, tmp_path / "second")
    registry.move_alias(second, CHAMPION, tags={})
    found = registry.find("chat", alias=CHAMPION)
    assert (found.number, found.tags["promoted_from"]) == ("2", "1")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("models:/chta/1", 'did you mean "chat"'),
        ("models:/chat/7", "must be one of 1"),
        ("models:/chat@champion", "given by trimtab promote"),
        ("models:chat", "like models:/NAME@champion"),
        ("models:/chat/1/2", "like models:/NAME@champion"),
    ],
)
def test_what_is_not_there_is_refused(registered: Version, name: str, hint: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_policy(name)
    assert hint in str(caught.value)


def test_other_names_stay_as_they_are() -> None:
    assert resolve_policy("static") == "static"
    assert resolve_policy("bundle:runs/first") == "bundle:runs/first"


def test_a_bundle_that_was_changed_afterwards_is_refused(
    registered: Version, tracking_uri: str, other_bundle: Path
) -> None:
    for name in ("policy.json", "policy.npz"):
        shutil.copyfile(other_bundle / name, Path(registered.source) / name)
    with pytest.raises(ModelError, match="digest"):
        ModelRegistry(tracking_uri).fetch(registered)


def test_files_that_are_gone_are_said(registered: Version, tracking_uri: str) -> None:
    shutil.rmtree(registered.source)
    with pytest.raises(ModelError, match="moved or deleted"):
        ModelRegistry(tracking_uri).fetch(registered)


def test_a_dead_registry_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    with pytest.raises(ModelError) as caught:
        resolve_policy("models:/chat@champion")
    assert "secret" not in str(caught.value)


def test_nothing_of_a_version_is_a_pickle(registered: Version) -> None:
    files = {path.name for path in Path(registered.source).rglob("*") if path.is_file()}
    assert files == {"policy.json", "policy.npz"}
    with np.load(Path(registered.source) / "policy.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype.kind in "fiuU" for name in arrays.files)
