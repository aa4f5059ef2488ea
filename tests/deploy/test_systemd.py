"""The units: systemd accepts them, they start what exists, and little is open to them."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.expressions import ROOT
from trimtab.controller.cli.app import main

UNITS = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
WORST_EXPOSURE = 20
"""In tenths, as `systemd-analyze security` counts: below 2.0 it says OK."""


def read(unit: Path) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=True, interpolation=None)
    parsed.optionxform = str  # type: ignore[method-assign,assignment]
    parsed.read_string(unit.read_text(encoding="utf-8"))
    return parsed


@pytest.fixture
def analyze(tmp_path: Path) -> list[str]:
    """The command `systemd-analyze`; the units' program stands where this test has one."""
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not installed (it comes with systemd)")
    for unit in UNITS:
        text = re.sub(r"/opt/[\w-]+/bin/trimtab", sys.executable, unit.read_text(encoding="utf-8"))
        (tmp_path / unit.name).write_text(text, encoding="utf-8")
    return [found]


def test_there_are_units() -> None:
    assert [unit.name for unit in UNITS] == ["trimtab-pull.service", "trimtab.service"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_accepts_it(analyze: list[str], tmp_path: Path, unit: Path) -> None:
    done = subprocess.run(
        [*analyze, "verify", tmp_path / unit.name], capture_output=True, text=True, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert unit.name not in said, said


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_little_is_open_to_it(analyze: list[str], tmp_path: Path, unit: Path) -> None:
    words = ["security", "--offline=true", "--no-pager", f"--threshold={WORST_EXPOSURE}"]
    done = subprocess.run(
        [*analyze, *words, tmp_path / unit.name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-400:] + done.stderr


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_it_comes_back_and_ends_by_sigterm(unit: Path) -> None:
    parsed = read(unit)
    assert parsed["Service"]["Restart"] == "always"
    assert parsed["Service"]["KillSignal"] == "SIGTERM"
    assert parsed["Unit"]["StartLimitIntervalSec"] == "0"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_command_has_the_flags_that_it_is_given(
    unit: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, command, *words = read(unit)["Service"]["ExecStart"].split()
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    for flag in (word for word in words if word.startswith("--")):
        assert flag in shown, f"trimtab {command} has no {flag}"
