"""`trimtab incident`: exit codes, one line for each fault, files whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from trimtab.controller.cli import app as root
from trimtab.controller.cli import incident
from trimtab.training.incidents.incident import Bound
from trimtab.training.incidents.suite import INCIDENTS
from trimtab.training.traces import read_trace

Cli = Callable[..., int]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run the command in a directory of its own."""
    commands = typer.Typer()
    incident.register(commands)
    # Typer makes a command of its own the root.
    commands.callback()(lambda: None)
    monkeypatch.setattr(root, "app", commands)
    monkeypatch.chdir(tmp_path)
    return lambda *words: root.main([str(word) for word in words])


def test_an_incident_writes_everything_and_says_where(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli("incident", "A", "--json", "r.json", "--markdown", "r.md", "--out", "out")
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.splitlines()[-3:] == ["json: r.json", "markdown: r.md", "report: out/incidents.html"]
    assert "Reproduced: agents' P50 TTFT" in out.replace("\n", " ")
    told = json.loads((tmp_path / "r.json").read_text())
    assert list(told["incidents"]) == ["A"]
    assert (tmp_path / "r.md").read_text().startswith("| incident, figure |")
    page = (tmp_path / "out" / "incidents.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "http" not in page
    # The traffic can be replayed under anything else.
    trace = read_trace(tmp_path / "out" / "A.parquet", rng=np.random.default_rng(0))
    assert len(trace) > 100


def test_the_table_goes_between_the_marks_of_a_page(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Before\n<!-- incidents -->\nold\n<!-- /incidents -->\nafter\n")
    assert cli("incident", "A", "--markdown", page) == 0
    text = page.read_text()
    assert text.startswith("# Before\n<!-- incidents -->\n| incident, figure |")
    assert text.endswith("|\n<!-- /incidents -->\nafter\n")
    assert "old" not in text


def test_a_page_without_marks_is_left_alone(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("precious\n")
    assert cli("incident", "A", "--markdown", page) == 2
    assert "--markdown" in capsys.readouterr().err
    assert page.read_text() == "precious\n"


def test_an_incident_that_is_not_cured_is_exit_code_1(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = INCIDENTS["A"]
    first = replace(known.figures[0], cured=Bound(high=0.001))
    monkeypatch.setitem(INCIDENTS, "A", replace(known, figures=(first, *known.figures[1:])))
    assert cli("incident", "A", "--json", "r.json") == 1
    assert capsys.readouterr().err == "trimtab: A is not cured\n"
    assert json.loads(Path("r.json").read_text())["incidents"]["A"]["cured"] is False


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("incident", "E"), ("E", "one of A, B, C, D, all")),
        (("incident",), ("incident",)),
        (("incident", "A", "--engine", "replai"), ("--engine", 'did you mean "replay"')),
        (("incident", "A", "--seed", "-1"), ("--seed", "from 0")),
        (("incident", "A", "--json", "no/where.json"), ("--json", "make no first")),
    ],
)
def test_wrong_usage_is_one_line(
    cli: Cli, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert cli(*words) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    for part in parts:
        assert part in err
