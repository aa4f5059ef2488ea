"""What the doctor says of packages, whatever is installed here."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from trimtab.controller.doctor.finding import Finding, Verdict
from trimtab.controller.doctor.installation import engine_seams, look, packages

REQUIRES = [
    "numpy>=2.0",
    'vllm<0.34,>=0.32; extra == "vllm"',
    'starlette>=0.40; extra == "daemon"',
    'uvicorn>=0.30; extra == "daemon"',
    'limits>=5.0; extra == "admission"',
    'pytest>=8.0; extra == "test"',
]
THERE = {"numpy": "2.3.5", "vllm": "0.33.0+cpu", "starlette": "0.41", "uvicorn": "0.31"}


def found(installed: dict[str, str]) -> dict[str, Finding]:
    return {one.check: one for one in packages(REQUIRES, installed.get)}


def test_what_is_there_is_named_with_its_version() -> None:
    told = found(THERE)
    assert told["packages"].verdict is Verdict.OK
    assert told["extra vllm"].found == "vllm 0.33.0+cpu"
    assert told["extra daemon"].found == "starlette 0.41, uvicorn 0.31"


def test_an_extra_that_nobody_installed_is_a_choice() -> None:
    one = found(THERE)["extra admission"]
    assert one.verdict is Verdict.NOTE
    assert "pip install 'trimtab[admission]'" in one.remedy


@pytest.mark.parametrize(
    ("change", "check", "verdict", "says"),
    [
        ({"numpy": "1.26"}, "packages", Verdict.FAULT, "numpy 1.26, must be >=2.0"),
        ({"numpy": None}, "packages", Verdict.FAULT, "numpy is missing"),
        ({"uvicorn": "0.2"}, "extra daemon", Verdict.WARNING, "uvicorn 0.2, must be >=0.30"),
        ({"vllm": "0.34.1"}, "extra vllm", Verdict.WARNING, "vllm 0.34.1, must be <0.34,>=0.32"),
    ],
)
def test_what_is_wrong_is_told_with_what_would_be_right(
    change: dict[str, str], check: str, verdict: Verdict, says: str
) -> None:
    one = found({k: v for k, v in {**THERE, **change}.items() if v})[check]
    assert (one.verdict, one.found) == (verdict, says)
    assert one.remedy.startswith("pip install")


def test_parts_of_an_extra_that_came_with_others_are_no_wish_for_it() -> None:
    one = found({k: v for k, v in THERE.items() if k != "uvicorn"})["extra daemon"]
    assert one.verdict is Verdict.NOTE
    assert one.found.startswith("not installed (uvicorn): ")


def test_an_extra_that_the_installed_version_lacks_is_not_called_missing() -> None:
    assert found(THERE)["extra ui"].found.startswith("not known to the installed version")


def test_without_a_package_only_packages_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("trimtab.controller.doctor.installation.metadata.requires", none)
    told = list(packages([], THERE.get))
    assert [(one.check, one.verdict) for one in told] == [("packages", Verdict.WARNING)]
    first = next(look())
    assert first.found.startswith("not installed as a package")


def test_an_unknown_vllm_is_a_fault_and_is_not_imported() -> None:
    before = "vllm" in sys.modules
    (one,) = engine_seams("0.99.0")
    assert one.verdict is Verdict.FAULT
    assert "0.99.0" in one.found
    assert "install a supported one" in one.remedy
    assert ("vllm" in sys.modules) == before


def test_this_installation_has_no_fault() -> None:
    pytest.importorskip("vllm")
    told = list(look())
    assert [one for one in told if one.verdict is Verdict.FAULT] == []
    assert {"packages", "vLLM's scheduler", "compiled code", "shipped policy"} <= {
        one.check for one in told
    }
