"""The bundle: what is written comes back; whatever is wrong with it is one line and a refusal."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.agents.bundles import random_bundle, zero_bundle
from trimtab.agents import arrays as arrays_module
from trimtab.agents import manifest as manifest_module
from trimtab.agents.bundle import Bundle, read_bundle, write_bundle
from trimtab.engine_bridge.errors import BundleError
from trimtab.engine_bridge.plan import load_plan

PLAN = load_plan()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_bundle(random_bundle(PLAN, 1), tmp_path / "made")
    return tmp_path / "made"


def refusal(folder: Path) -> str:
    with pytest.raises(BundleError) as fault:
        read_bundle(folder)
    assert "\n" not in str(fault.value)
    return str(fault.value)


def edit(folder: Path, change: Callable[[dict], object]) -> None:
    path = folder / "policy.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_arrays(folder: Path, **changes: object) -> None:
    with np.load(folder / "policy.npz") as found:
        content = {**found, **changes}
    np.savez(folder / "policy.npz", **{k: v for k, v in content.items() if v is not None})


def test_what_is_written_comes_back(folder: Path) -> None:
    written, found = random_bundle(PLAN, 1), read_bundle(folder)
    assert sorted(os.listdir(folder)) == ["policy.json", "policy.npz"]
    assert found.digest == written.digest
    for one, other in zip(written.layers, found.layers, strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.array_equal(one[1], other[1])
    assert found.action_schema == written.action_schema
    assert (found.training, found.versions) == (written.training, written.versions)


def test_equal_content_is_equal_bytes_and_equal_digest(folder: Path, tmp_path: Path) -> None:
    digest = write_bundle(random_bundle(PLAN, 1), tmp_path / "again")
    assert digest == read_bundle(folder).digest
    for name in ("policy.json", "policy.npz"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_the_digest_is_of_the_content_and_not_of_the_machine() -> None:
    bundle = random_bundle(PLAN, 1)
    elsewhere = replace(bundle, versions={"numpy": "9", "run_id": "x", "written": "2026-01-01"})
    assert elsewhere.digest == bundle.digest
    moved = bundle.layers[0][1].copy()
    moved[0] = np.nextafter(moved[0], 1)
    changed = [
        replace(bundle, layers=((bundle.layers[0][0], moved), bundle.layers[1])),
        replace(bundle, training={"algorithm": "none", "seed": 2}),
        replace(bundle, trace_digests=()),
        replace(bundle, envelope_high=bundle.envelope_high * np.float32(0.5)),
        replace(bundle, plan_digest="cd" * 32),
    ]
    assert len({bundle.digest, *(one.digest for one in changed)}) == 6


def test_no_folder_gets_a_suggestion(folder: Path) -> None:
    assert 'did you mean "made"?' in refusal(folder.parent / "mde")


@pytest.mark.parametrize("name", ["policy.json", "policy.npz"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert name in refusal(folder)
    assert "no such file" in refusal(folder)


@pytest.mark.parametrize("found", [2, "1", None, True, 1.5])
def test_an_unknown_format_shows_both_values(folder: Path, found: object) -> None:
    edit(folder, lambda content: content.update(format=found))
    line = refusal(folder)
    assert "format: " in line
    assert "must be 1" in line
    assert json.dumps(found).strip('"') in line


def test_arrays_of_another_bundle_are_refused_with_both_digests(
    folder: Path, tmp_path: Path
) -> None:
    other = random_bundle(PLAN, 2)
    write_bundle(other, tmp_path / "other")
    (folder / "policy.npz").write_bytes((tmp_path / "other" / "policy.npz").read_bytes())
    line = refusal(folder)
    assert random_bundle(PLAN, 1).digest in line
    assert line.count("digest") == 1
    assert "copy both again" in line


def test_one_changed_bit_is_refused(folder: Path) -> None:
    with np.load(folder / "policy.npz") as found:
        weights = found["layer0_weights"]
    weights[3, 2] += 1e-6
    edit_arrays(folder, layer0_weights=weights)
    assert "that of the content" in refusal(folder)


def test_an_action_schema_that_this_version_reads_otherwise_is_refused(folder: Path) -> None:
    edit(folder, lambda content: content["action"].update(digest="0" * 64))
    line = refusal(folder)
    assert "action.digest" in line
    assert "0" * 64 in line
    assert zero_bundle(PLAN).action_schema.digest in line


BAD_TEXT = {
    "no json": (lambda text: text[: len(text) // 2], "JSON"),
    "not utf-8": (lambda text: b"\xff" + text, "JSON"),
    "nan": (lambda text: text.replace(b'"seed": 1', b'"seed": NaN'), "NaN"),
    "a list": (lambda text: b"[]", "an object"),
    "nested": (lambda text: b"[" * 200_000, "JSON"),
    "an unknown key": (lambda text: text.replace(b'"traces"', b'"trases"'), '"traces"?'),
    "a missing key": (lambda text: text.replace(b'"activation": "tanh",', b""), "activation"),
    "another activation": (lambda text: text.replace(b'"tanh"', b'"relu"'), "tanh"),
    "a digest that is none": (lambda text: text.replace(b"ab" * 32, b"xy" * 32), "traces.0"),
    "an unknown knob": (lambda text: text.replace(b'"shed_at"', b'"shed_it"'), "shed_at"),
    "a text for a number": (lambda text: text.replace(b'"size": 1', b'"size": "1"'), "JSON"),
}


@pytest.mark.parametrize("name", BAD_TEXT)
def test_text_that_is_no_manifest_is_refused(folder: Path, name: str) -> None:
    change, shown = BAD_TEXT[name]
    path = folder / "policy.json"
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    assert shown in refusal(folder)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_no_numbers_are_refused(folder: Path, value: float) -> None:
    biases = np.zeros(8, np.float32)
    biases[5] = value
    edit_arrays(folder, layer0_biases=biases)
    line = refusal(folder)
    assert "layer0_biases[5]" in line
    assert "a finite number" in line
    (weights, _), last = zero_bundle(PLAN).layers
    broken = replace(zero_bundle(PLAN), layers=((weights, biases), last))
    with pytest.raises(BundleError, match="layer0_biases"):
        write_bundle(broken, folder / "x")
    assert not (folder / "x").exists()


BAD_ARRAYS = {
    "another shape": ({"layer0_biases": np.zeros(7, np.float32)}, "(8,)"),
    "another rank": ({"layer0_biases": np.zeros((8, 1), np.float32)}, "(8,)"),
    "float64": ({"layer0_biases": np.zeros(8)}, "float32"),
    "integers": ({"layer0_biases": np.zeros(8, np.int32)}, "float32"),
    "one more": ({"extra": np.zeros(2, np.float32)}, "extra.npy"),
    "one less": ({"layer1_biases": None}, "layer1_biases.npy"),
    "objects": ({"layer0_biases": np.array([{}] * 8, object)}, "allow_pickle"),
    "a huge one": ({"layer0_biases": np.zeros(50_000_000 // 4, np.float32)}, "bytes"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_that_do_not_fit_are_refused(folder: Path, name: str) -> None:
    changes, shown = BAD_ARRAYS[name]
    edit_arrays(folder, **changes)
    assert shown in refusal(folder)


def test_an_archive_that_unpacks_to_much_more_is_refused_unread(folder: Path) -> None:
    packed = io.BytesIO()
    names = read_bundle(folder).arrays()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(f"{name}.npy", b"\0" * (64 << 20) if "0_w" in name else b"")
    (folder / "policy.npz").write_bytes(packed.getvalue())
    assert "67,108,864 bytes" in refusal(folder)


def test_what_is_no_archive_is_refused_and_nothing_is_unpickled(
    folder: Path, tmp_path: Path
) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (os.mkdir, (str(tmp_path / "sprung"),))

    for content in (b"", b"PK", pickle.dumps(Trap()), b"\x93NUMPY\x01\x00"):
        (folder / "policy.npz").write_bytes(content)
        refusal(folder)
    write_bundle(random_bundle(PLAN, 1), folder)
    edit_arrays(folder, layer0_biases=np.array([Trap()] * 8, object))
    refusal(folder)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("name", "module"), [("policy.json", manifest_module), ("policy.npz", arrays_module)]
)
def test_files_that_are_too_large_are_refused(folder: Path, name: str, module: object) -> None:
    with (folder / name).open("r+b") as file:
        file.truncate(module.MOST_BYTES + 1)  # type: ignore[attr-defined]
    line = refusal(folder)
    assert name in line
    assert f"{module.MOST_BYTES + 1:,} bytes" in line  # type: ignore[attr-defined]


BAD_BUNDLES: dict[str, Callable[[Bundle], Bundle]] = {
    "no layer": lambda b: replace(b, layers=()),
    "layers that do not chain": lambda b: replace(b, layers=(b.layers[1], b.layers[0])),
    "too few outputs": lambda b: replace(b, layers=b.layers[:1]),
    "an envelope of another size": lambda b: replace(b, envelope_low=b.envelope_low[1:]),
    "an envelope upside down": lambda b: replace(b, envelope_low=b.envelope_high + 1),
    "training that is no json": lambda b: replace(b, training={"at": object()}),
    "training that is no number": lambda b: replace(b, training={"best": float("nan")}),
}


@pytest.mark.parametrize("name", BAD_BUNDLES)
def test_what_could_not_be_read_again_is_not_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(BundleError):
        write_bundle(BAD_BUNDLES[name](zero_bundle(PLAN)), tmp_path / "made")
    assert not (tmp_path / "made" / "policy.json").exists()


def test_a_kill_while_writing_leaves_the_bundle_before(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_bundle(folder).digest

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.agents.bundle.write_arrays", killed)
    with pytest.raises(KeyboardInterrupt):
        write_bundle(random_bundle(PLAN, 2), folder)
    assert sorted(os.listdir(folder)) == ["policy.json", "policy.npz"]
    assert read_bundle(folder).digest == before


def test_a_kill_between_the_files_leaves_a_pair_that_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = []

    def killed(source: str, target: Path) -> None:
        if replaced:
            raise KeyboardInterrupt
        replaced.append(target)
        Path(source).rename(target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_bundle(random_bundle(PLAN, 2), folder)
    assert "digest" in refusal(folder)
