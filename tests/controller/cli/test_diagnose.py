"""`trimtab diagnose`: its three sources, what it writes, one line for each wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.stand_in import StandIn
from tests.training.diagnosis.known import ENGINE_8B, RUNS
from tests.training.profile.incidents import write_log
from trimtab.controller.cli.app import main
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.live.scrape import ScrapeSource
from trimtab.engine_bridge.plan import load_plan
from trimtab.training.diagnosis.sources import from_metrics
from trimtab.training.traces.canonical_write import write_trace
from trimtab.training.tuning.plan_text import plan_text

BLOCKED = next(make for trouble, make in RUNS if trouble == "prefill_blocking")
INFEASIBLE = next(make for trouble, make in RUNS if trouble == "infeasible_plan")


def run(*words: object) -> int:
    """A command."""
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def whatif(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A what-if of blocked chats, stock rules and the fair scheduler."""
    folder = tmp_path_factory.mktemp("whatif")
    known = BLOCKED(np.random.default_rng(0))
    write_trace(known.trace, folder / "t.parquet")
    code = run(
        "whatif", "--trace", folder / "t.parquet", "--policy", "stock-fcfs", "--policy", "static",
        "--max-num-batched-tokens", 512, "--json", folder / "r.json", "--jobs", 1,
    )  # fmt: skip
    assert code == 0
    return folder / "r.json"


def test_a_whatif_tells_its_trouble(
    whatif: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "d.json"
    assert run("diagnose", whatif, "--json", out) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("r.json: stock-fcfs: prefill_blocking")
    assert "policy static instead of stock rules" in printed
    content = json.loads(out.read_text())
    assert content["schema"] == 1
    assert content["signature"] == "prefill_blocking"
    assert content["remedy"]["policy"] == "static"
    assert content["findings"][0]["tier"] == "T0"


def test_the_other_contender_is_healthy(whatif: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diagnose", whatif, "--policy", "static") == 0
    assert "healthy" in capsys.readouterr().out


def test_the_proposed_plan_can_be_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = INFEASIBLE(np.random.default_rng(0))
    trace, plan, result = tmp_path / "t.parquet", tmp_path / "plan.yaml", tmp_path / "r.json"
    write_trace(known.trace, trace)
    # A comment of the user's, and a target changed in place.
    text = plan_text(None).replace("ttft_ms: 800,", "ttft_ms: 60,")
    plan.write_text("# ours\n" + text)
    words = ("--trace", trace, "--policy", "static", "--jobs", 1)
    assert run("whatif", *words, "--plan", plan, "--json", result) == 0
    tried = tmp_path / "tried.yaml"
    assert run("diagnose", result, "--plan", plan, "--write-plan", tried) == 0
    assert "# ours" in tried.read_text()
    changed = load_plan(tried)
    assert (changed.tiers["T0"].targets.ttft_ms or 0.0) > 60.0
    assert run("whatif", *words, "--plan", tried, "--json", result) == 0
    capsys.readouterr()
    assert run("diagnose", result, "--plan", tried) == 0
    assert "infeasible_plan" not in capsys.readouterr().out


def test_a_traffic_log_tells_its_trouble(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = BLOCKED(np.random.default_rng(0))
    write_log(known.trace, tmp_path / "log")
    assert run("diagnose", tmp_path / "log", "--engine", ENGINE_8B) == 0
    # The log was written under the fair scheduler: nothing was blocked.
    assert "healthy" in capsys.readouterr().out


def test_a_page_of_metrics_is_watched(tmp_path: Path) -> None:
    plan = load_plan()
    with StandIn(tmp_path, plan) as engine:
        page = ScrapeSource(engine.metrics_url, timeout_s=5.0)
        found = from_metrics(page, plan, get_engine_spec(ENGINE_8B), window_s=6.0)
    assert found.signs.requests > 0
    assert set(found.signs.tiers) == set(plan.tiers)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nowhere.json",), "make one with trimtab whatif --json"),
        (("{whatif}", "--policy", "stcok-fcfs"), 'did you mean "stock-fcfs"?'),
        (("{whatif}", "--seed", "4"), "--seed: 4, must be one of 0"),
        (("{whatif}", "--plan", "published"), "give the what-if's plan with --plan"),
        (("{whatif}", "--seconds", "0"), "--seconds"),
        (("{broken}",), "must be the JSON of trimtab whatif --json"),
        (("http://127.0.0.1:9/metrics",), "127.0.0.1:9"),
        (("{whatif}", "--json", "{whatif}"), "another file than an input"),
    ],
)
def test_wrong_input_gets_one_line(
    words: tuple[str, ...],
    said: str,
    whatif: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema": 1}')
    code = run("diagnose", *(word.format(whatif=whatif, broken=broken) for word in words))
    out, err = capsys.readouterr()
    assert code in (1, 2)
    assert out == ""
    assert len(err.splitlines()) == 1
    assert said in err
