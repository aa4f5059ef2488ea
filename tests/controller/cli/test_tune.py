"""`trimtab tune`: what it writes and says, and one line for each fault."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from trimtab.controller.cli import app as root
from trimtab.controller.cli import tune
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.training.traces import write_trace
from trimtab.training.traces.generate import generate
from trimtab.training.tuning import search
from trimtab.training.tuning.plan_text import plan_text

Cli = Callable[..., int]

EQUAL = "\n".join(
    line.replace(line.split("weight:")[1], " 1  # as all others") if "    weight:" in line else line
    for line in plan_text("default").splitlines()
)
"""The default plan with equal weights: there is much to gain."""


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run the command in a directory of its own."""
    commands = typer.Typer()
    commands.callback()(lambda: None)
    tune.register(commands)
    monkeypatch.setattr(root, "app", commands)
    monkeypatch.chdir(tmp_path)
    return lambda *words: root.main(["tune", *(str(word) for word in words)])


@pytest.fixture
def trace(tmp_path: Path) -> str:
    spec = get_engine_spec("h100:llama-3.1-8b-tp1")
    traffic = generate(hours=0.03, seed=4, preset="steady", load=1.6, spec=spec)
    write_trace(traffic, tmp_path / "t.parquet")
    return "t.parquet"


def test_a_gain_is_written_in_the_users_own_file(
    cli: Cli, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "equal.yaml").write_text(EQUAL)
    code = cli(
        "--trace", trace, "--plan", "equal.yaml", "--trials", 12, "--seed", 1, "--out", "p.yaml",
        "--variations", 1, "--json", "r.json", "--jobs", 2,
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "plan: p.yaml"
    assert "Weighted attainment +" in out
    data = json.loads((tmp_path / "r.json").read_text())
    assert (data["schema"], data["trials"], data["written"]) == (1, 12, "tuned")
    assert data["gain_shown"] is True
    assert data["gain"]["weighted_attainment"]["ci95"][0] > 0
    plan = load_plan(tmp_path / "p.yaml")
    assert plan.name == "default-tuned"
    text = (tmp_path / "p.yaml").read_text()
    assert text.startswith("# Tuned from plan default by trimtab tune:")
    assert "# as all others" in text
    for change in data["changes"]:
        assert change["knob"] in out


def test_where_no_gain_is_shown_the_given_plan_is_written_as_it_is(
    cli: Cli, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli("--trace", trace, "--trials", 1, "--out", "p.yaml", "--json", "r.json", "--jobs", 1)
    assert code == 0
    assert "No better plan was found" in capsys.readouterr().out
    assert (tmp_path / "p.yaml").read_text() == plan_text("default")
    data = json.loads((tmp_path / "r.json").read_text())
    assert (data["written"], data["gain"], data["changes"]) == ("given", None, [])


def test_ctrl_c_writes_the_best_so_far(
    cli: Cli,
    trace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "equal.yaml").write_text(EQUAL)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "_final", interrupt)
    code = cli(
        "--trace", trace, "--plan", "equal.yaml", "--trials", 8, "--out", "p.yaml",
        "--variations", 1, "--jobs", 1,
    )  # fmt: skip
    assert code == 130
    assert "Interrupted; 8 plans were tried" in capsys.readouterr().out
    assert load_plan(tmp_path / "p.yaml").name == "default-tuned"


def test_the_plan_does_not_depend_on_the_number_of_processes(
    cli: Cli, trace: str, tmp_path: Path
) -> None:
    (tmp_path / "equal.yaml").write_text(EQUAL)
    for jobs in (1, 2):
        cli(
            "--trace", trace, "--plan", "equal.yaml", "--trials", 5, "--out", f"p{jobs}.yaml",
            "--variations", 1, "--jobs", jobs, "--write-best",
        )  # fmt: skip
    assert (tmp_path / "p1.yaml").read_bytes() == (tmp_path / "p2.yaml").read_bytes()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--trials", 0), "--trials: 0, must be from 1 to 100,000"),
        (("--variations", 0), "--variations: 0, must be from 1 to 100"),
        (("--jobs", 0), "--jobs: 0, must be from 1 to 1,024"),
        (("--seed", -1), "--seed: -1, must be from 0 to"),
        (("--trace", "t.parquet"), '--trace: "t.parquet", must be given once'),
        (("--validation", "none.csv"), "none.csv: cannot be read"),
        (("--plan", "defualt"), 'did you mean "default"?'),
        (("--engine", "h100:llama"), "engine:"),
        (("--json", "p.yaml"), "another file than that of --out"),
        (("--json", "t.parquet"), "another file than an input of this command"),
        (("--json", "none/r.json"), "make none first"),
    ],
)
def test_a_bad_flag_is_one_line_and_no_file(
    cli: Cli,
    trace: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[object, ...],
    line: str,
) -> None:
    assert cli("--trace", trace, "--out", "p.yaml", *words) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert not (tmp_path / "p.yaml").exists()


def test_without_optuna_it_says_what_to_install(
    cli: Cli, trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert cli("--trace", trace, "--trials", 2, "--out", "p.yaml", "--jobs", 1) == 1
    err = capsys.readouterr().err
    assert "optuna is not installed; install the extra: pip install 'trimtab[train]'" in err
