"""The HTML report: self-contained, deterministic, honest, readable on a phone."""

from __future__ import annotations

import html as html_text
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from tests.training.fluid_engine import FluidEngine, mixed_trace
from trimtab.engine_bridge.engine_spec import get_engine_spec
from trimtab.engine_bridge.plan import load_plan
from trimtab.training.report import svg, words
from trimtab.training.report.page import render
from trimtab.training.report.verdict import Verdict, verdict
from trimtab.training.whatif import run as whatif_run
from trimtab.training.whatif.run import Contender, Outcome, Study, run_study
from trimtab.training.whatif.schema import Difference

PLAN = load_plan()
POLICIES = ("static", "stock-fcfs", "stock-priority", "reactive")
LARGEST_BYTES = 2_000_000


def make(*, hours: float = 0.2, policies: tuple[str, ...] = POLICIES, seeds: int = 1) -> Outcome:
    study = Study(
        trace=mixed_trace(hours=hours),
        plan=PLAN,
        contenders=tuple(Contender(label=p, policy=p, plan=PLAN) for p in policies),
        spec=get_engine_spec("h100:llama-3.1-70b-tp8"),
        seeds=tuple(range(seeds)),
        drain_s=600.0,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whatif_run, "ReplayEngine", FluidEngine)
        outcome = run_study(study, processes=1)
    return replace(outcome, result=replace(outcome.result, command="trimtab whatif --trace 'a b'"))


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return make()


@pytest.fixture(scope="module")
def page(outcome: Outcome) -> str:
    return render(outcome)


class Strict(HTMLParser):
    """Fails on tags that are not closed in order, and on anything that would be fetched."""

    void = frozenset(("meta", "line", "path", "rect", "circle", "br"))

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "poster"):
                assert value is not None
                assert value.startswith("#"), f"{tag} {name}={value}"
        assert tag not in ("script", "link", "iframe", "img", "object")
        self.titles += tag == "title"
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.void

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_fetches_nothing(page: str) -> None:
    parser = Strict()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"url\(|@import|https?://", page)


def test_the_page_is_small_and_the_same_every_time(page: str) -> None:
    assert len(page.encode()) < LARGEST_BYTES
    assert render(make()) == page


def test_longer_traffic_makes_no_larger_page(page: str) -> None:
    assert len(render(make(hours=0.9, policies=("static",))).encode()) < 1.5 * len(page.encode())


def test_every_chart_has_a_title_and_a_description(page: str) -> None:
    charts = re.findall(r'<svg class="chart".*?</svg>', page, re.S)
    assert len(charts) > 4 * 3
    for chart in charts:
        assert "<title>" in chart
        assert "<desc>" in chart
        assert "nan" not in chart.lower().replace("finance", "")


def test_the_verdict_comes_first_then_tables_plots_and_method(page: str) -> None:
    order = [page.index(part) for part in (
        'class="lead"', 'id="overview"', 'id="time"', 'id="differences"', 'id="figures"',
        'id="method"',
    )]  # fmt: skip
    assert order == sorted(order)
    assert "trimtab whatif --trace &#x27;a b&#x27;" in page


def test_the_cost_section_has_every_tier_and_the_engine(outcome: Outcome, page: str) -> None:
    section = page[page.index('id="economics"') : page.index('id="figures"')]
    assert section.count('class="group"') == len(PLAN.tiers) + 1
    assert section.count("Break-even price") == len(PLAN.tiers) + 1
    assert "Revenue" not in section
    for run in outcome.result.results:
        hourly = run.economics.engine.cost_usd / run.economics.window_s * 3600
        assert hourly == pytest.approx(run.economics.usd_per_hour)
        assert words.dollars(hourly) in section


def test_what_a_priced_tier_brings_in_is_told(outcome: Outcome) -> None:
    result = outcome.result
    run = result.results[0]
    sold = replace(run.economics.tiers["T0"], price_per_1m_tokens=9.0, revenue_usd=0.5)
    money = replace(run.economics, tiers={**run.economics.tiers, "T0": sold})
    priced = replace(result, results=(replace(run, economics=money), *result.results[1:]))
    page = render(replace(outcome, result=priced))
    assert "priced at $9.00" in page
    assert page.count("Revenue / margin an hour") == 1


def test_one_contender_needs_no_differences() -> None:
    page = render(make(policies=("static",)))
    assert 'id="differences"' not in page
    assert "winner" not in page


def test_several_seeds_say_so() -> None:
    page = render(make(hours=0.05, policies=("static", "stock-fcfs"), seeds=2))
    assert "mean of 2 seeds" in page
    assert "Seed 0 is shown" in page


def test_names_from_outside_are_escaped(outcome: Outcome) -> None:
    evil = "<script>alert(1)</script>"
    page = render(
        replace(outcome, result=replace(outcome.result, engine=evil, plan=evil, command=evil))
    )
    assert "<script>" not in page


def test_misses_are_marked_by_signs_not_by_colour_alone(outcome: Outcome, page: str) -> None:
    shares = [words.attained(outcome.result, p, "T0") for p in POLICIES]
    assert any(share < PLAN.tiers["T0"].targets.attainment for share in shares)
    assert 'aria-label="missed">✗' in page
    assert 'aria-label="best">★' in page


def difference(mean: float, low: float, high: float, policy: str = "stock-fcfs") -> Difference:
    return Difference(
        policy=policy,
        against="static",
        metric="weighted_attainment",
        mean=mean,
        ci95=(low, high),
    )


def ranked(outcome: Outcome, *, static: float, fcfs: float, gap: Difference) -> str:
    return judged(outcome, static=static, fcfs=fcfs, gap=gap).headline


def judged(outcome: Outcome, *, static: float, fcfs: float, gap: Difference) -> Verdict:
    level = {"static": static, "stock-fcfs": fcfs}
    results = tuple(
        replace(run, engine=replace(run.engine, weighted_attainment=level[run.policy]))
        for run in outcome.result.results
        if run.policy in level
    )
    return verdict(replace(outcome.result, results=results, differences=(gap,)))


def test_the_verdict_names_a_winner_only_if_chance_is_ruled_out(outcome: Outcome) -> None:
    clear = ranked(outcome, static=0.8, fcfs=0.9, gap=difference(0.1, 0.05, 0.15))
    assert clear.startswith("stock-fcfs serves 90.0 %")
    assert "+10.0 points (95 % interval +5.0 to +15.0)" in clear
    vague = ranked(outcome, static=0.8, fcfs=0.81, gap=difference(0.01, -0.02, 0.04))
    assert vague.startswith("No clear winner")
    same = ranked(outcome, static=0.8, fcfs=0.8, gap=difference(0.0, 0.0, 0.0))
    assert same.startswith("No difference")


def test_without_a_clear_winner_the_costs_are_the_references(outcome: Outcome) -> None:
    clear = judged(outcome, static=0.8, fcfs=0.9, gap=difference(0.1, 0.05, 0.15))
    assert "stock-fcfs gives up" in clear.costs[0]
    vague = judged(outcome, static=0.8, fcfs=0.81, gap=difference(0.01, -0.02, 0.04))
    assert "static gives up" in vague.costs[0]


def test_a_winning_reference_is_told_from_its_own_side(outcome: Outcome) -> None:
    text = ranked(outcome, static=0.9, fcfs=0.8, gap=difference(-0.1, -0.15, -0.05))
    assert text.startswith("static serves 90.0 %")
    assert "+10.0 points (95 % interval +5.0 to +15.0)" in text


def test_the_verdict_tells_what_the_winner_gives_up(outcome: Outcome) -> None:
    found = verdict(outcome.result)
    assert len(found.tiers) == 4
    assert found.costs[0].startswith(("What ", f"{found.headline.split()[0]} gives up nothing"))


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.0, "100 %"), (0.99996, "99.9 %"), (0.5, "50.0 %"), (0.0, "0.0 %"), (float("nan"), "–")],  # noqa: RUF001
)
def test_percentages_never_round_up_to_a_full_hundred(share: float, text: str) -> None:
    assert words.percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.04, "0.0"), (-0.04, "0.0"), (1.25, "+1.2"), (-1234.5, "−1,234.5")],  # noqa: RUF001
)
def test_signed_numbers(value: float, text: str) -> None:
    assert words.signed(value) in (text, text.replace("1.2", "1.3"))


@pytest.mark.parametrize("highest", [0.0, 0.3, 1.0, 7.0, 99.0, 12_345.0, 3e6])
def test_axes_cover_their_values_with_few_distinct_ticks(highest: float) -> None:
    for axis in (svg.linear_axis(highest), svg.log1p_axis(highest)):
        assert axis.high >= highest
        labels = [text for _, text in axis.ticks]
        assert 2 <= len(labels) <= 7
        assert len(set(labels)) == len(labels)
        heights = axis.y([value for value, _ in axis.ticks])
        assert (np.diff(heights) < -11).all()


@pytest.mark.parametrize("factor", [1.0, 1.05, 3.0, 40.0, 1e4])
def test_ratio_axes_are_even_around_one(factor: float) -> None:
    axis = svg.ratio_axis(1 / factor, factor)
    middle = (svg.HEIGHT - svg.BOTTOM + svg.TOP) / 2
    assert float(axis.y([1.0])[0]) == pytest.approx(middle)
    assert len(axis.ticks) <= 7


@pytest.mark.parametrize("end_s", [3.0, 59.0, 900.0, 3600.0, 90_000.0, 1e6])
def test_time_labels_fit(end_s: float) -> None:
    chart = svg.line_chart(
        title="t",
        description="d",
        time_s=np.linspace(0, end_s, 50),
        end_s=end_s,
        axis=svg.linear_axis(1.0),
        lines=[svg.Line(values=np.full(50, np.nan), css="s0")],
    )
    labels = re.findall(r"text-anchor=\"(?:start|middle|end)\">([^<]*)<", chart)
    assert len(labels) <= 14


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_it_without_sideways_scrolling(
    page: str, tmp_path: Path, width: int
) -> None:
    """A frame of the given width measures the page; a headless window cannot be that narrow."""
    probe = (
        "<script>addEventListener('load',()=>{const d=document.querySelector('iframe')"
        ".contentDocument;const small=[...d.querySelectorAll('svg.chart text')].filter("
        "t=>t.getBoundingClientRect().height<8).length;document.title="
        "[d.documentElement.scrollWidth,d.querySelectorAll('svg.chart').length,small].join(' ')"
        "})</script>"
    )
    frame = f'<iframe width="{width}" height="900" srcdoc="{html_text.escape(page)}"></iframe>'
    outer = tmp_path / "outer.html"
    outer.write_text(f"<!doctype html><title></title>{frame}{probe}", encoding="utf-8")
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1500,1000",
            "--virtual-time-budget=5000", "--dump-dom", outer.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search(r"<title>([\d ]+)</title>", done.stdout)
    assert title is not None, done.stderr[-500:]
    scroll_width, charts, unreadable = map(int, title[1].split())
    assert scroll_width <= width
    assert charts > 10
    assert unreadable == 0
