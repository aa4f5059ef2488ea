"""The incidents: stock rules show them, ours do not, on every seed that is tried."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trimtab.training.incidents import replayed, table, words
from trimtab.training.incidents.incident import (
    AFTER,
    BEFORE,
    Bound,
    Figure,
    examine,
)
from trimtab.training.incidents.suite import INCIDENTS, SuiteResult, run_suite

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def suite() -> SuiteResult:
    return run_suite(list(INCIDENTS), "replay", seed=0)


@pytest.mark.parametrize("key", INCIDENTS)
def test_each_incident_is_there_and_is_cured(suite: SuiteResult, key: str) -> None:
    verdict = next(v for v in suite.verdicts if v.incident.key == key)
    assert verdict.reproduced, words.sentence(verdict)
    assert verdict.cured, words.sentence(verdict)
    # And is judged by something, on both sides.
    assert any(f.reproduced is not None for f in verdict.findings)
    assert any(f.cured is not None for f in verdict.findings)


@pytest.mark.parametrize("key", INCIDENTS)
def test_the_seed_is_not_a_lucky_one(key: str) -> None:
    for seed in (1, 2):
        verdict = examine(INCIDENTS[key], replayed.serve, seed, beside=False)
        assert verdict.reproduced, f"seed {seed}: {words.sentence(verdict)}"
        assert verdict.cured, f"seed {seed}: {words.sentence(verdict)}"


@pytest.mark.parametrize("key", INCIDENTS)
def test_stock_rules_would_not_pass_for_the_cure(suite: SuiteResult, key: str) -> None:
    """The bounds can fail: what stock rules made of the traffic does not hold them."""
    verdict = next(v for v in suite.verdicts if v.incident.key == key)
    runs = {**verdict.runs, AFTER: verdict.runs[BEFORE]}
    judged = [
        figure.cured.holds(figure.after(runs))
        for figure in verdict.incident.figures
        if figure.cured is not None and figure.after is not None
    ]
    assert not all(judged)


def test_the_result_for_machines(suite: SuiteResult) -> None:
    told = json.loads(suite.to_json())
    assert list(told["incidents"]) == ["A", "B", "C", "D"]
    for key, one in told["incidents"].items():
        assert one["reproduced"] is True
        assert one["cured"] is True
        names = {figure["name"] for figure in one["figures"]}
        assert set(one["before"]) | set(one["after"]) == names, key
        assert one["before"], key
        assert "before, priority" in one["others"]
    assert told["incidents"]["D"]["refusals"]["after"] == {"413 prefill_too_long": 2}


def test_equal_seeds_are_equal_runs(suite: SuiteResult) -> None:
    again = run_suite(["A"], "replay", seed=0)
    whole = json.loads(suite.to_json())["incidents"]["A"]
    assert json.loads(again.to_json())["incidents"]["A"] == whole
    other = run_suite(["A"], "replay", seed=1)
    assert json.loads(other.to_json())["incidents"]["A"]["before"] != whole["before"]


def pages_with_the_table() -> list[Path]:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    return [page for page in pages if table.has_marks(page.read_text(encoding="utf-8"))]


def test_the_pages_show_what_the_command_makes(suite: SuiteResult) -> None:
    pages = pages_with_the_table()
    assert ROOT / "docs" / "incidents.md" in pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text == table.in_page(text, table.markdown(suite)), f"{page.name}: make incidents"


def test_a_figure_outside_its_bound_is_told(suite: SuiteResult) -> None:
    verdict = suite.verdicts[0]
    strict = Figure(
        name="x",
        words="Agents' P50 TTFT",
        unit="s",
        before=lambda runs: 0.5,
        after=lambda runs: 0.25,
        reproduced=Bound(high=0.4),
        cured=Bound(low=0.1, high=0.2),
    )
    incident = replace(verdict.incident, stage=lambda serve, seed: verdict.runs, figures=(strict,))
    judged = examine(incident, replayed.serve, 0, beside=False)
    assert not judged.reproduced
    assert not judged.cured
    assert words.sentence(judged) == (
        "Not reproduced: agents' P50 TTFT 0.500 s, not at most 0.400 s. "
        "Not cured: agents' P50 TTFT 0.250 s, not 0.100 s to 0.200 s."
    )
    assert next(table.rows(judged))[-1] == words.NO
    assert "**not reproduced**, **not cured**" in table.markdown(
        SuiteResult(engine="replay", seed=0, verdicts=(judged,))
    )


def test_of_many_figures_that_hold_the_first_are_named_and_the_others_counted(
    suite: SuiteResult,
) -> None:
    poison = next(one for one in suite.verdicts if one.incident.key == "D")
    held = sum(finding.cured is True for finding in poison.findings)
    told = words.sentence(poison)
    assert told.endswith(f"; and {held - words.MOST_NAMED} further bounds hold.")
    assert "Cured: chat's P99 TTFT" in told
    assert len(told) < 600


def test_what_is_not_known_holds_no_bound() -> None:
    assert not Bound(low=0.0).holds(float("nan"))
    assert not Bound(high=1.0).holds(float("inf"))
    assert Bound(low=1.0, high=1.0).holds(1.0)
    assert words.figure(float("inf"), "s") == "never"
    assert words.figure(float("nan"), "s") == words.NONE


def test_every_request_ends_and_the_timeline_covers_the_run(suite: SuiteResult) -> None:
    for run in (run for verdict in suite.verdicts for run in verdict.runs.values()):
        line, q = run.served.timeline, run.served.requests
        assert len(q["outcome"]) == len(run.trace)
        assert (q["outcome"] != 0).all()
        # A step may last longer than an interval.
        assert (np.diff(line.time_s) >= 0).all()
        assert line.time_s[-1] >= run.served.end_s
        assert line.preemptions.sum() == q["preemptions"].sum()
        assert (line.kv_fraction.sum(1) <= 1.0).all()
