"""A bundle that is broken, made for something else, or exchanged while it is at work."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")

from tests.chaos.rig import Rig, trial
from trimtab.agents.bundle import read_bundle, write_bundle

pytestmark = pytest.mark.slow
LOOK_S = 2.0
"""Time between two looks of the daemon at its bundle's folder."""


@pytest.fixture(autouse=True)
def bundle(rig: Rig, tmp_path: Path) -> Iterator[Path]:
    """The daemon's folder with the right bundle in it, before and after."""
    kept = tmp_path / "kept"
    shutil.copytree(rig.bundle, kept)
    rig.usual_daemon()
    yield rig.bundle
    put(kept, rig.bundle)


def put(bundle: Path, folder: Path) -> None:
    """Lay a bundle's files where another one's are."""
    for name in ("policy.npz", "policy.json"):
        part = folder / f".{name}.part"
        shutil.copy(bundle / name, part)
        part.rename(folder / name)


def test_half_of_a_file(rig: Rig, bundle: Path, tmp_path: Path) -> None:
    arrays = bundle / "policy.npz"
    whole = arrays.read_bytes()
    with trial(rig, "bundle cut short on disk") as tried:
        arrays.write_bytes(whole[: len(whole) // 2])
        assert "policy.npz" in tried.look(lambda state: bool(state["bundle_error"]))["bundle_error"]
        tried.acts_on(LOOK_S)
        arrays.write_bytes(whole)
        tried.healed()
        rig.usual_daemon().wait_for(lambda state: not state["bundle_error"], what="a right bundle")


def test_another_schema(rig: Rig, bundle: Path) -> None:
    manifest = bundle / "policy.json"
    whole = manifest.read_text()
    other = json.loads(whole)
    other["observation"]["digest"] = "0" * len(other["observation"]["digest"])
    with trial(rig, "bundle of another schema") as tried:
        manifest.write_text(json.dumps(other))
        assert tried.look(lambda state: bool(state["bundle_error"]))["bundle_error"]
        tried.acts_on(LOOK_S)
        manifest.write_text(whole)
        tried.healed()
        rig.usual_daemon().wait_for(lambda state: not state["bundle_error"], what="a right bundle")


def test_a_new_bundle_while_the_old_one_acts(rig: Rig, bundle: Path, tmp_path: Path) -> None:
    old = read_bundle(bundle)
    (weights, biases), *rest = old.layers
    write_bundle(replace(old, layers=((weights * 0.5, biases), *rest)), tmp_path / "new")
    new = read_bundle(tmp_path / "new")
    with trial(rig, "bundle exchanged while it acts") as tried:
        put(tmp_path / "new", bundle)
        tried.look(lambda state: state["bundle_digest"] == new.digest)
        tried.healed()
        # The new one has proved nothing yet: static, and a probation.
        tried.falls_back(2 * rig.interval_s + 1)
