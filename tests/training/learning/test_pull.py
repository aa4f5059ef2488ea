"""Bundles pulled from a real registry in SQLite into a folder that others read all the time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.training.learning.test_model_registry import register
from trimtab.agents.bundle import read_bundle
from trimtab.controller.cli.app import main
from trimtab.controller.cli.pull import keep_pulling
from trimtab.engine_bridge.errors import FlagError, ModelError
from trimtab.training.learning.model_registry import CHAMPION, ModelRegistry, Version
from trimtab.training.learning.pull import Puller, PullError

MODEL = "models:/chat@champion"


@pytest.fixture
def champion(tracking_uri: str, bundle: Path, tmp_path: Path) -> Version:
    """Version 1 of `chat`, the champion."""
    version = register(tracking_uri, bundle, tmp_path / "run1")
    ModelRegistry(tracking_uri).move_alias(version, CHAMPION, tags={})
    return version


@pytest.fixture
def challenger(champion: Version, tracking_uri: str, other_bundle: Path, tmp_path: Path) -> Version:
    """Version 2, nobody's champion yet."""
    return register(tracking_uri, other_bundle, tmp_path / "run2")


def promote(uri: str, version: Version) -> None:
    ModelRegistry(uri).move_alias(version, CHAMPION, tags={})


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "live" / "policy"


def puller(uri: str, into: Path, *, keep: int = 4, model: str = MODEL) -> Puller:
    return Puller(model, into, connect=lambda: ModelRegistry(uri), keep=keep)


def test_the_champion_is_laid_down_behind_a_link(
    champion: Version, tracking_uri: str, into: Path, bundle: Path
) -> None:
    one = puller(tracking_uri, into)
    found = one.pull()
    digest = read_bundle(bundle).digest
    assert (found.version.number, found.digest, found.changed) == ("1", digest, True)
    assert into.is_symlink()
    assert os.readlink(into) == f"policy.versions/{digest[:32]}"
    assert read_bundle(into).digest == digest
    assert not one.pull().changed
    assert [path.name for path in into.parent.iterdir() if path.name[0] == "."] == []


def test_a_promoted_version_takes_its_place_and_gives_it_back(
    champion: Version, challenger: Version, tracking_uri: str, into: Path, other_bundle: Path
) -> None:
    one = puller(tracking_uri, into)
    first = one.pull()
    promote(tracking_uri, challenger)
    second = one.pull()
    assert (second.version.number, second.changed) == ("2", True)
    assert read_bundle(into).digest == read_bundle(other_bundle).digest
    promote(tracking_uri, champion)
    assert one.pull().digest == first.digest == read_bundle(into).digest
    assert len(list(into.with_name("policy.versions").iterdir())) == 2


def test_only_the_newest_versions_stay(
    champion: Version, challenger: Version, tracking_uri: str, into: Path
) -> None:
    one = puller(tracking_uri, into, keep=1)
    one.pull()
    promote(tracking_uri, challenger)
    digest = one.pull().digest
    assert [path.name for path in into.with_name("policy.versions").iterdir()] == [digest[:32]]


def test_a_reader_never_sees_half_a_bundle(
    champion: Version, challenger: Version, tracking_uri: str, into: Path
) -> None:
    one = puller(tracking_uri, into)
    digests = {one.pull().digest}
    ended, faults, seen = threading.Event(), [], set()

    def read() -> None:
        while not ended.is_set():
            try:
                seen.add(read_bundle(into.resolve()).digest)
            except Exception as fault:
                faults.append(fault)

    reader = threading.Thread(target=read)
    reader.start()
    for version in [challenger, champion] * 3:
        promote(tracking_uri, version)
        digests.add(one.pull().digest)
    ended.set()
    reader.join()
    assert faults == []
    assert seen <= digests


def test_a_copy_that_was_damaged_is_written_anew(
    champion: Version, challenger: Version, tracking_uri: str, into: Path
) -> None:
    one = puller(tracking_uri, into)
    digest = one.pull().digest
    (into / "policy.npz").write_bytes(b"damaged")
    assert one.digest is None
    assert one.pull().changed
    assert read_bundle(into).digest == digest


def test_a_real_folder_is_not_overwritten(tracking_uri: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    with pytest.raises(FlagError, match=r"--into.*move it away"):
        puller(tracking_uri, tmp_path / "real")


def test_a_registry_that_breaks_leaves_what_is_there(
    champion: Version, tracking_uri: str, into: Path
) -> None:
    one = puller(tracking_uri, into)
    digest = one.pull().digest
    Path(tracking_uri.removeprefix("sqlite:///")).write_bytes(b"no database" * 1000)
    with pytest.raises(PullError, match="models at"):
        puller(tracking_uri, into).pull()
    assert read_bundle(into).digest == digest


def test_a_changed_bundle_is_not_taken(
    champion: Version, challenger: Version, tracking_uri: str, into: Path
) -> None:
    one = puller(tracking_uri, into)
    digest = one.pull().digest
    promote(tracking_uri, challenger)
    shutil.copyfile(Path(champion.source) / "policy.npz", Path(challenger.source) / "policy.npz")
    with pytest.raises(PullError, match="digest"):
        one.pull()
    assert read_bundle(into).digest == digest


def test_a_disk_that_refuses_leaves_what_is_there(
    champion: Version, challenger: Version, tracking_uri: str, into: Path
) -> None:
    one = puller(tracking_uri, into)
    digest = one.pull().digest
    promote(tracking_uri, challenger)
    versions = into.with_name("policy.versions")
    versions.rename(into.with_name("kept"))
    versions.write_text("in the way")
    with pytest.raises(PullError, match=r"policy\.versions"):
        one.pull()
    versions.unlink()
    into.with_name("kept").rename(versions)
    assert read_bundle(into).digest == digest
    assert one.pull().changed


@pytest.mark.parametrize("model", ["chat", "models:chat", "models:/chat@a/b"])
def test_a_model_of_another_form_is_refused(tracking_uri: str, into: Path, model: str) -> None:
    with pytest.raises(ModelError, match=r"MODEL: .*like models:/NAME@champion"):
        puller(tracking_uri, into, model=model)


def test_the_command_pulls_once(
    champion: Version, into: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pull", MODEL, "--into", str(into)]) == 0
    assert f"{into} is now {MODEL}: version 1, digest" in capsys.readouterr().out
    assert main(["pull", MODEL, "--into", str(into)]) == 0
    assert f"{into} is already {MODEL}" in capsys.readouterr().out


def test_the_command_fails_without_a_registry(
    champion: Version,
    into: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["pull", MODEL, "--into", str(into)]) == 0
    digest = read_bundle(into).digest
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")
    assert main(["pull", MODEL, "--into", str(into)]) == 1
    captured = capsys.readouterr()
    assert "reachable" in captured.err
    assert "secret" not in captured.out + captured.err
    assert read_bundle(into).digest == digest


def test_a_dead_registry_is_said_once_and_its_return_too(
    champion: Version,
    challenger: Version,
    tracking_uri: str,
    into: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    uri = tracking_uri
    pauses = 0

    def pause() -> None:
        nonlocal pauses, uri
        pauses += 1
        if pauses == 2:
            uri = "http://127.0.0.1:9"
            one._registry = None
        elif pauses == 5:
            uri = tracking_uri
            promote(tracking_uri, challenger)
        elif pauses == 8:
            raise KeyboardInterrupt

    one = Puller(MODEL, into, connect=lambda: ModelRegistry(uri), keep=4)
    with pytest.raises(KeyboardInterrupt):
        keep_pulling(one, MODEL, into, pause=pause)
    first, dead, back = capsys.readouterr().out.splitlines()
    assert "is now models:/chat@champion: version 1" in first
    assert dead.startswith("not pulled, the bundle that is there stays: models at http://127.0.0.1")
    assert "is now models:/chat@champion: version 2" in back


def test_a_kill_at_any_time_leaves_a_whole_bundle(
    champion: Version, challenger: Version, tracking_uri: str, into: Path
) -> None:
    """A process that only lays down, again and again, is killed in the middle."""
    body = """
import sys
from pathlib import Path
from trimtab.training.learning.pull import Puller
puller = Puller("models:/chat@champion", Path(sys.argv[1]), connect=None, keep=2)
sources = [Path(name) for name in sys.argv[2:]]
from trimtab.agents.bundle import read_bundle
digests = [read_bundle(source).digest for source in sources]
print("begun", flush=True)
while True:
    for source, digest in zip(sources, digests):
        puller._lay_down(source, digest)
        puller._prune()
"""
    digests = {read_bundle(Path(version.source)).digest for version in (champion, challenger)}
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", body, str(into), champion.source, challenger.source],
            stdout=subprocess.PIPE,
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            while not into.exists():
                os.sched_yield()
            child.kill()
        assert read_bundle(into).digest in digests
    assert puller(tracking_uri, into).pull().version.number == "1"
