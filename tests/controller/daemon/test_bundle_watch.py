"""A bundle that changes on disk: read beside the loop, taken once, and never half."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trimtab.agents.bundle import ARRAYS_NAME, MANIFEST_NAME, Bundle, read_bundle, write_bundle
from trimtab.agents.registry import SHIPPED_BUNDLE
from trimtab.controller.daemon.bundle_watch import (
    BundleWatch,
    NamedPolicy,
    Offer,
    Terms,
    policy_source,
)
from trimtab.engine_bridge.errors import FlagError
from trimtab.engine_bridge.plan import load_plan

TERMS = Terms(plan=load_plan(), seed=0, deadline_s=1.0, threaded=False)
SHIPPED = read_bundle(SHIPPED_BUNDLE)


def another(seed: int) -> Bundle:
    """The shipped bundle with other biases in the last layer."""
    weights, biases = SHIPPED.layers[-1]
    moved = biases + np.float32(0.01) * np.float32(seed)
    return replace(SHIPPED, layers=(*SHIPPED.layers[:-1], (weights, moved)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    write_bundle(another(1), folder)
    return folder


def name_and_digest(offer: Offer) -> tuple[str, str | None]:
    return offer.policy.name, offer.bundle_digest


def test_it_begins_with_the_bundle_that_is_there(folder: Path) -> None:
    watch = BundleWatch(folder, TERMS)
    assert name_and_digest(watch.first()) == ("learned", another(1).digest)
    assert watch.newer() is None
    assert watch.error == ""
    assert watch.name == f"bundle:{folder}"


def test_a_newer_bundle_is_told_of_once(folder: Path) -> None:
    watch = BundleWatch(folder, TERMS)
    watch.first()
    write_bundle(another(2), folder)
    assert watch.newer() is None, "only a look reads"
    watch.look()
    offer = watch.newer()
    assert offer is not None
    assert offer.bundle_digest == another(2).digest
    watch.look()
    assert watch.newer() is None


def test_of_two_changes_between_two_ticks_the_last_one_counts(folder: Path) -> None:
    watch = BundleWatch(folder, TERMS)
    watch.first()
    for seed in (2, 3):
        write_bundle(another(seed), folder)
        watch.look()
    offer = watch.newer()
    assert offer is not None
    assert offer.bundle_digest == another(3).digest


def test_a_link_that_is_moved_is_a_change(tmp_path: Path, folder: Path) -> None:
    write_bundle(another(2), tmp_path / "second")
    link = tmp_path / "champion"
    link.symlink_to(folder)
    watch = BundleWatch(link, TERMS)
    watch.first()
    (tmp_path / "new-link").symlink_to(tmp_path / "second")
    (tmp_path / "new-link").rename(link)
    watch.look()
    offer = watch.newer()
    assert offer is not None
    assert offer.bundle_digest == another(2).digest


def break_arrays(folder: Path) -> None:
    (folder / ARRAYS_NAME).write_bytes(b"no zip at all")


def cut_manifest(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(path.read_text()[:100])


def mix_pair(folder: Path) -> None:
    """The manifest of one bundle beside the arrays of another: what a kill may leave."""
    other = folder.parent / "other"
    write_bundle(another(5), other)
    shutil.copy(other / MANIFEST_NAME, folder / MANIFEST_NAME)


def other_observations(folder: Path) -> None:
    write_bundle(replace(another(6), observation_digest="0" * 64), folder)


def other_tiers(folder: Path) -> None:
    write_bundle(replace(another(6), tier_names=("A", "B", "C", "D")), folder)


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def be_a_folder(folder: Path) -> None:
    (folder / ARRAYS_NAME).unlink()
    (folder / ARRAYS_NAME).mkdir()


@pytest.mark.parametrize(
    "spoil",
    [break_arrays, cut_manifest, mix_pair, other_observations, other_tiers, remove, be_a_folder],
)
def test_what_is_no_bundle_for_this_plan_leaves_the_old_one_and_says_why(
    folder: Path, spoil: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(spoil)
    watch = BundleWatch(folder, TERMS)
    watch.first()
    spoil(folder)
    for _ in range(3):
        watch.look()
    assert watch.newer() is None
    assert watch.error
    assert "\n" not in watch.error
    assert len([r for r in caplog.records if "not taken" in r.message]) == 1, "said once"
    shutil.rmtree(folder, ignore_errors=True)
    write_bundle(another(2), folder)
    watch.look()
    offer = watch.newer()
    assert offer is not None
    assert offer.bundle_digest == another(2).digest
    assert watch.error == ""


def test_the_bundle_that_is_at_work_already_is_no_change(folder: Path) -> None:
    watch = BundleWatch(folder, TERMS)
    watch.first()
    break_arrays(folder)
    watch.look()
    write_bundle(another(1), folder)
    watch.look()
    assert watch.newer() is None
    assert watch.error == ""


def test_without_a_bundle_it_is_static_until_one_comes(tmp_path: Path) -> None:
    watch = BundleWatch(tmp_path / "later", TERMS)
    assert name_and_digest(watch.first()) == ("static", None)
    assert "no such folder" in watch.error
    write_bundle(another(1), tmp_path / "later")
    watch.look()
    offer = watch.newer()
    assert offer is not None
    assert name_and_digest(offer) == ("learned", another(1).digest)


def test_a_fault_of_the_disk_is_tried_again_although_nothing_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = BundleWatch(folder, TERMS)
    watch.first()
    write_bundle(another(2), folder)
    from trimtab.controller.daemon import bundle_watch

    with monkeypatch.context() as patched:

        def fail(folder: Path) -> Bundle:
            raise OSError(5, "Input/output error")

        patched.setattr(bundle_watch, "read_bundle", fail)
        watch.look()
        assert "Input/output error" in watch.error
    for _ in range(20):
        watch.look()
    assert watch.error == ""
    assert watch.newer() is not None


def test_a_loop_that_begins_again_gets_the_bundle_as_it_is_now(folder: Path) -> None:
    watch = BundleWatch(folder, TERMS)
    first = watch.first()
    write_bundle(another(2), folder)
    again = watch.first()
    assert again.bundle_digest == another(2).digest
    assert again.policy is not first.policy
    assert watch.newer() is None


def test_an_order_to_reload_reads_again(folder: Path) -> None:
    watch = BundleWatch(folder, TERMS)
    watch.first()
    seen = watch._seen
    watch.reload()
    text = json.loads((folder / MANIFEST_NAME).read_text())
    assert text["digest"] == another(1).digest
    watch.look()
    assert watch._seen == seen
    assert watch.newer() is None, "the same bundle does not begin a probation"


@pytest.mark.parametrize("name", ["static", "reactive", "learned"])
def test_policies_that_come_with_trimtab_are_begun_and_never_change(name: str) -> None:
    source = policy_source(name, TERMS)
    assert isinstance(source, NamedPolicy)
    first, second = source.first(), source.first()
    assert first.policy.policy.name == name
    assert first.policy is not second.policy
    assert (first.bundle_digest is not None) is (name == "learned")
    source.reload()
    assert source.newer() is None
    assert source.error == ""


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(FlagError, match="lerned"):
        policy_source("lerned", TERMS)
