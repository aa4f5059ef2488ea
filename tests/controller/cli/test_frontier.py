"""`trimtab frontier`: real replays of a crowded cache, its table, files and faults."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from trimtab.controller.cli import app as root
from trimtab.controller.cli import frontier
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.training.economics import reserve
from trimtab.training.traces import write_trace
from trimtab.training.traces.generate import generate

Cli = Callable[..., int]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run the command in a directory of its own, which has a short trace."""
    commands = typer.Typer()
    commands.callback()(lambda: None)
    frontier.register(commands)
    monkeypatch.setattr(root, "app", commands)
    monkeypatch.chdir(tmp_path)
    spec = get_engine_spec("h100:llama-3.1-8b-tp1")
    write_trace(
        generate(hours=0.012, seed=4, preset="steady", load=1.3, spec=spec), Path("t.parquet")
    )
    return lambda *words: root.main(["frontier", *(str(word) for word in words)])


def test_a_sweep_is_told_written_and_repeated(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--trace", "t.parquet", "--points", 3, "--seeds", 2, "--move", "prefill", "--move", "kv",
        "--num-gpu-blocks", 3000, "--jobs", 1,
    )  # fmt: skip
    assert cli(*words, "--json", "a.json", "--html", "a.html") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[-1] == "report: a.html"
    assert "T0: prefill share" in out
    assert "T0: KV guarantee" in out
    assert "the plan" in out
    data = json.loads((tmp_path / "a.json").read_text())
    assert (data["schema"], data["tier"], data["seeds"]) == (1, "T0", [0, 1])
    prefill, kv = data["frontiers"]
    assert (prefill["knobs"], kv["knobs"]) == (["prefill"], ["kv"])
    assert [p["reserve"] for p in prefill["points"]] == [0.0, 0.5, 0.55, 1.0]
    assert [p["reserve"] for p in kv["points"]] == [0.0, 0.5, 0.7, 1.0]
    assert [p["within_bounds"] for p in kv["points"]] == [False, True, True, False]
    plan = next(p for p in prefill["points"] if p["is_plan"])
    for found in (prefill, kv):
        assert len({point["goodput"]["mean"] for point in found["points"]}) > 1
    assert plan["attainment_gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert plan["attainment"]["low"] <= plan["tier_attainment"]["T0"] + 0.05
    page = (tmp_path / "a.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count('<svg class="chart"') == 2
    assert "nan" not in page.lower()
    assert cli(*data["command"].split()[2:], "--json", "b.json") == 0
    assert (tmp_path / "b.json").read_text() == (tmp_path / "a.json").read_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--tier", "T9"), ("--tier", "T9", "T0, T1, T2, T3")),
        (("--move", "prefil"), ("--move", "prefill", "did you mean")),
        (("--move", "kv+kv"), ("--move", "kv+kv")),
        (("--points", "1"), ("--points", "from 2")),
        (("--seeds", "0"), ("--seeds", "from 1")),
        (("--json", "t.parquet"), ("--json", "another file")),
        (("--html", "no/a.html"), ("--html", "make no first")),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    cli: Cli, words: tuple[str, ...], told: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("--trace", "t.parquet", *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for word in told:
        assert word in err


def test_the_flag_knows_what_can_be_moved() -> None:
    assert frontier._KNOBS == reserve.KNOBS
