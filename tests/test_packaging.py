"""The import name that pyproject.toml builds is the tree at the root."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("agents", "controller", "engine_bridge", "envs", "training")
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_of_the_tree_is_listed() -> None:
    tree = {
        ".".join(("trimtab", *init.parent.relative_to(ROOT).parts))
        for folder in FOLDERS
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(SETUPTOOLS["packages"]) == tree


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {m.parent for f in FOLDERS for m in (ROOT / f).rglob("*.py")}
    assert {f for f in folders if not (f / "__init__.py").exists()} == set()


def test_every_root_is_mapped_and_typed() -> None:
    assert SETUPTOOLS["package-dir"] == {f"trimtab.{folder}": folder for folder in FOLDERS}
    assert all((ROOT / folder / "py.typed").exists() for folder in FOLDERS)


def test_every_kind_of_data_file_is_packaged() -> None:
    suffixes = {
        path.suffix
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packaged = {Path(p.replace("*", "x")).suffix for p in SETUPTOOLS["package-data"]["*"]}
    assert suffixes - {".py", ".typed", ".nbc", ".nbi", ".pyc"} <= packaged
