"""`trimtab whatif` and `demo`: exit codes, one line for each fault, files whole or absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import typer

from tests.training.fluid_engine import FluidEngine, mixed_trace
from trimtab.controller.cli import app as root
from trimtab.controller.cli import demo, whatif
from trimtab.engine_bridge.errors import ReplayError
from trimtab.engine_bridge.trace import Trace
from trimtab.training.traces import generate, write_trace
from trimtab.training.whatif import run as whatif_run

Cli = Callable[..., int]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Run a command in a directory of its own, on the test double of the engine."""
    commands = typer.Typer()
    whatif.register(commands)
    demo.register(commands)
    monkeypatch.setattr(root, "app", commands)
    monkeypatch.setattr(whatif_run, "ReplayEngine", FluidEngine)
    monkeypatch.chdir(tmp_path)
    return lambda *words: root.main([str(word) for word in words])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.parquet"
    write_trace(mixed_trace(hours=0.02), path)
    return path


def test_a_whole_run_writes_everything_and_says_where(
    cli: Cli, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = cli(
        "whatif", "--trace", trace, "--policy", "static", "--policy", "stock-fcfs", "--seeds", 2,
        "--json", "r.json", "--html", "r.html", "--requests", "r.parquet", "--jobs", 1,
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "report: r.html"
    data = json.loads((tmp_path / "r.json").read_text())
    assert [(r["policy"], r["seed"]) for r in data["results"]] == [
        ("static", 0), ("static", 1), ("stock-fcfs", 0), ("stock-fcfs", 1),
    ]  # fmt: skip
    assert data["command"].startswith("trimtab whatif --trace ")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "r.parquet").stat().st_size > 0
    assert not list(tmp_path.glob(".*"))


def test_traffic_is_generated_for_the_engine_that_replays_it() -> None:
    assert generate.DEFAULT_ENGINE == whatif.DEFAULT_ENGINE


def test_without_a_policy_all_are_compared(cli: Cli, trace: Path, tmp_path: Path) -> None:
    assert cli("whatif", "--trace", trace, "--json", "r.json") == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert [r["policy"] for r in data["results"]] == list(whatif.DEFAULT_POLICIES)


def test_further_plans_are_compared_like_policies(cli: Cli, trace: Path, tmp_path: Path) -> None:
    words = ("whatif", "--trace", trace, "--plan", "default", "--plan", "published")
    assert cli(*words, "--json", "r.json") == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert [r["policy"] for r in data["results"]] == ["static", "static@published"]
    assert {d["against"] for d in data["differences"]} == {"static"}


def test_the_engines_limits_reach_the_engine(cli: Cli, trace: Path, tmp_path: Path) -> None:
    limits = (
        "--max-num-seqs", 7, "--max-num-batched-tokens", 1024, "--num-gpu-blocks", 999,
        "--block-size", 32, "--no-enable-prefix-caching",
    )  # fmt: skip
    assert cli("whatif", "--trace", trace, "--policy", "static", *limits, "--json", "r.json") == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["engine_limits"] == {
        "max_num_seqs": 7,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks": 999,
        "block_size": 32,
        "enable_prefix_caching": False,
    }
    assert data["command"].endswith("--no-enable-prefix-caching")


def test_the_command_in_the_result_repeats_it(cli: Cli, trace: Path, tmp_path: Path) -> None:
    assert cli("whatif", "--trace", trace, "--policy", "static", "--json", "a.json") == 0
    first = json.loads((tmp_path / "a.json").read_text())
    assert cli(*first["command"].split()[1:], "--json", "b.json") == 0
    assert (tmp_path / "b.json").read_text() == (tmp_path / "a.json").read_text()


PLAN_WITHOUT_T3 = """
name: three
tiers:
  T0: {weight: 3, pool: all, prefill_share: 0.4, targets: {ttft_ms: 800}}
  T1: {weight: 2, pool: all, prefill_share: 0.3, targets: {ttft_ms: 800}}
  T2: {weight: 1, pool: all, prefill_share: 0.3, targets: {ttft_ms: 800}}
pools: {all: 1.0}
"""

BAD = {
    "unknown policy": (["--policy", "reactiv"], 'did you mean "reactive"'),
    "policy in another case": (["--policy", "STATIC"], 'did you mean "static"'),
    "same policy twice": (["--policy", "static", "--policy", "static"], "once"),
    "same plan twice": (["--plan", "default", "--plan", "default"], "once"),
    "no seeds": (["--seeds", "0"], "--seeds: 0"),
    "negative seeds": (["--seeds", "-3"], "--seeds: -3"),
    "seeds as words": (["--seeds", "two"], "--seeds"),
    "seeds as a fraction": (["--seeds", "1.5"], "--seeds"),
    "too many seeds": (["--seeds", "1001"], "1,000"),
    "no jobs": (["--jobs", "0"], "--jobs: 0"),
    "negative drain": (["--drain-s", "-1"], "--drain-s"),
    "drain is no number": (["--drain-s", "nan"], "--drain-s"),
    "missing trace": (["--trace", "nowhere.parquet"], "nowhere.parquet"),
    "trace is a text": (["--trace", "plan.yaml"], "plan.yaml"),
    "unknown plan": (["--plan", "publishd"], 'did you mean "published"'),
    "missing plan file": (["--plan", "nowhere.yaml"], "nowhere.yaml"),
    "plan lacks a tier of the trace": (["--plan", "three.yaml"], "T3"),
    "plan is a trace": (["--plan", "t.parquet"], "t.parquet"),
    "unknown engine": (["--engine", "h100:llama-3.1-70b-tp9"], "did you mean"),
    "missing engine file": (["--engine", "nowhere.yaml"], "nowhere.yaml"),
    "json in a missing directory": (["--json", "no/r.json"], "no/r.json"),
    "html in a missing directory": (["--html", "no/r.html"], "no/r.html"),
    "requests in a missing directory": (["--requests", "no/r.parquet"], "no/r.parquet"),
    "html is a directory": (["--html", "."], "--html"),
    "two outputs in one file": (["--html", "r", "--json", "r"], "another file"),
    "output over the trace": (["--requests", "t.parquet"], "another file"),
    "output over the plan": (["--plan", "plan.yaml", "--html", "plan.yaml"], "another file"),
    "batch of none": (["--max-num-seqs", "0"], "--max-num-seqs"),
    "negative tokens": (["--max-num-batched-tokens", "-1"], "--max-num-batched-tokens"),
    "no blocks": (["--num-gpu-blocks", "0"], "--num-gpu-blocks"),
    "blocks of no tokens": (["--block-size", "0"], "--block-size"),
    "block size does not divide": (["--trace", "p.parquet", "--block-size", "24"], "divisor of"),
    "block larger than a prefix": (["--trace", "p.parquet", "--block-size", "128"], "divisor of"),
    "misspelt flag": (["--polcy", "static"], "--policy"),
    "a word too many": (["static"], "static"),
    "value missing": (["--seeds"], "--seeds"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_wrong_usage_is_one_line_and_exit_code_2(
    fault: str, cli: Cli, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, hint = BAD[fault]
    (tmp_path / "three.yaml").write_text(PLAN_WITHOUT_T3)
    (tmp_path / "plan.yaml").write_text(PLAN_WITHOUT_T3 + "\n")
    if "p.parquet" in flags:
        write_trace(with_prefixes(), tmp_path / "p.parquet")
    before = sorted(path.name for path in tmp_path.iterdir())
    given = flags if "--trace" in flags else ["--trace", "t.parquet", *flags]
    assert cli("whatif", *given) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert hint in err
    assert "Traceback" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_no_trace_at_all_is_wrong_usage(cli: Cli, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli("whatif") == 2
    assert "--trace" in capsys.readouterr().err


def test_a_prefix_block_needs_no_divisor_without_prefix_caching(cli: Cli, tmp_path: Path) -> None:
    write_trace(with_prefixes(), tmp_path / "p.parquet")
    words = ("whatif", "--trace", "p.parquet", "--policy", "static", "--block-size", 24)
    assert cli(*words, "--no-enable-prefix-caching") == 0


def test_a_fault_of_ours_is_exit_code_1_and_leaves_no_file(
    cli: Cli,
    trace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(self: FluidEngine, interval_s: float) -> None:
        raise ReplayError("replay stuck at 3 s")

    monkeypatch.setattr(FluidEngine, "advance", broken)
    (tmp_path / "r.json").write_text("old")
    assert cli("whatif", "--trace", trace, "--json", "r.json", "--html", "r.html") == 1
    assert capsys.readouterr().err.splitlines() == ["trimtab: replay stuck at 3 s"]
    assert (tmp_path / "r.json").read_text() == "old"
    assert not (tmp_path / "r.html").exists()


def test_the_demo_needs_nothing_and_ends_with_its_report(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(generate, "demo_trace", lambda seed: mixed_trace(seed, hours=0.02))
    assert cli("demo", "--json", "d.json") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "report: trimtab-demo.html"
    assert (tmp_path / "trimtab-demo.html").exists()
    data = json.loads((tmp_path / "d.json").read_text())
    assert [r["policy"] for r in data["results"]] == [*whatif.DEFAULT_POLICIES, "learned"]


@pytest.mark.parametrize("words", [("--seed", -1), ("--seed", "x"), ("--html", "no/where.html")])
def test_the_demo_refuses_wrong_usage(
    cli: Cli, words: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("demo", *words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def with_prefixes() -> Trace:
    return Trace.build(
        arrival_s=[0.0, 1.0],
        prompt_tokens=100,
        output_tokens=5,
        prefix_offsets=np.array([0, 1, 2]),
        prefix_ids=np.zeros(2, np.int32),
        prefix_block_tokens=np.full(2, 64, np.int32),
    )


def test_a_draft_model_is_told_and_can_be_repeated(cli: Cli, trace: Path, tmp_path: Path) -> None:
    flags = ("--draft-tokens", 4, "--draft-us", 12.5, "--acceptance", "T0=0.75,T1=0.4")
    assert cli("whatif", "--trace", trace, "--policy", "static", *flags, "--json", "r.json") == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["draft"]["tokens"] == 4
    assert data["draft"]["acceptance"] == [["T0", 0.75], ["T1", 0.4]]
    assert "--draft-tokens 4 --draft-us 12.5 --acceptance T0=0.75,T1=0.4" in data["command"]


def test_drafts_of_which_nothing_is_known_are_refused(
    cli: Cli, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("whatif", "--trace", trace, "--draft-tokens", 4) == 2
    assert "--acceptance" in capsys.readouterr().err
