"""`trimtab profile`: what it reads, what it counts, what it writes, and its errors."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.controller.web.browser import CHROMIUM, Browser
from tests.training.profile import incidents
from tests.training.profile.senders import STEADY, Sender, log
from trimtab.controller.cli.app import main
from trimtab.engine_bridge.vllm.traffic_log import TrafficLog
from trimtab.training.profile import figures
from trimtab.training.profile.figures import most_within
from trimtab.training.profile.logged import read_logged
from trimtab.training.traces import read_trace

SINCE_UNIX_S = incidents.ORIGIN_UNIX_S + 600.0
WORDS = ["--since", f"{SINCE_UNIX_S}", "--seconds", "120"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of steady tenants and a loud one."""
    folder = tmp_path_factory.mktemp("log")
    loud = Sender("<b>loud</b>", "T1", per_s=(0.5, 6.0), shared=(0.5, 0.5), cached=(0.5, 0.4))
    log(folder, [*STEADY, loud])
    return folder


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "profile"
    alert = out.parent / "alert.json"
    alert.write_text(
        json.dumps(
            {"engine": "a", "tier": "T0", "p99_ttft_ms": 4100.0, "baseline_ms": 900.0,
             "for_s": 31.0, "waiting": {"T0": 12, "T3": 0}, "running": {"T0": 8}}
        )
    )  # fmt: skip
    words = ["profile", "--traffic-log", str(folder), "--out", str(out), "--alert", str(alert)]
    assert main([*words, *WORDS]) == 0
    return out


@pytest.fixture(scope="module")
def content(made: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made / "profile.json").read_text())
    return found


def test_the_window_and_the_time_before_it_are_counted_apart(content: dict[str, Any]) -> None:
    assert content["window"]["requests"] == 5 * 120 + 6 * 120
    assert content["before"] == {"seconds": 600.0, "requests": 5 * 600 + 300}
    assert content["window"]["outcomes"] == {"finished": 1320}


def test_who_asks_for_most_comes_first_with_what_it_asked_for_before(
    content: dict[str, Any],
) -> None:
    first = content["who"][0]
    assert (first["tenant"], first["tier"]) == ("<b>loud</b>", "T1")
    assert first["requests_per_s"] == pytest.approx(6.0)
    assert first["before"]["requests_per_s"] == pytest.approx(0.5)
    # Fresh 60 % of 1,600 tokens + 0.1 x the cached rest + 3 x 100, six times a second.
    assert first["demand_tokens_per_s"] == pytest.approx(6 * (960 + 64 + 300))
    assert sum(row["demand_share"] for row in content["who"]) == pytest.approx(1.0)


def test_lengths_and_latencies_are_by_tier(content: dict[str, Any]) -> None:
    assert content["lengths"]["T1"]["prompt_tokens"]["now"]["max"] == 1600
    assert content["ttft_ms"]["T0"]["now"]["p99"] == pytest.approx(200.0)
    assert len(content["longest"]) == 5


def test_bursts_are_peaks_over_means(content: dict[str, Any]) -> None:
    loud = content["bursts"]["tenants"]["<b>loud</b>"]
    assert loud["mean_per_s"] == pytest.approx(6.0)
    assert loud["peak_1s_over_mean"] == pytest.approx(1.0, abs=0.2)
    assert content["bursts"]["all"]["mean_per_s"] == pytest.approx(11.0)


def test_prefixes_are_counted_without_content(content: dict[str, Any]) -> None:
    top = content["prefixes"]["top"][0]
    assert (top["requests"], top["tokens"], top["tenant"]) == (720, 800, "<b>loud</b>")
    now = content["prefixes"]["now"]
    assert now["repeated_share"] == pytest.approx(720 * 800 / (1320 * 1600), abs=1e-6)
    assert now["cached_share"] == pytest.approx(720 * 640 / (1320 * 1600), abs=1e-6)


def test_the_trace_is_the_windows_traffic_and_what_if_reads_it(made: Path, tmp_path: Path) -> None:
    trace = read_trace(made / "trace.parquet", rng=np.random.default_rng(0))
    assert len(trace) == 1320
    assert 0.0 <= trace.arrival_s[0] < 1.0
    assert trace.arrival_s[-1] < 120.0
    result = tmp_path / "r.json"
    words = ["whatif", "--trace", str(made / "trace.parquet"), "--policy", "static"]
    assert main([*words, "--seeds", "1", "--json", str(result)]) == 0
    assert json.loads(result.read_text())["trace"]["requests"] == 1320


def test_the_page_says_why_it_was_made_and_what_it_lacks(made: Path) -> None:
    page = (made / "profile.html").read_text()
    assert "P99 time to first token of T0 was 4,100 ms, 4.6 times its 900 ms" in page
    assert "12 of T0" in page
    assert "&lt;b&gt;loud&lt;/b&gt;" in page
    assert "<b>loud" not in page


def test_the_page_fetches_nothing_and_is_small(made: Path) -> None:
    page = (made / "profile.html").read_text()
    assert re.findall(r"(?:src|href)=|https?://|@import", page) == []
    assert len(page) < 200_000


def test_the_folder_is_for_the_user_alone(made: Path) -> None:
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_it_without_sideways_scrolling(
    made: Path, tmp_path: Path, width: int
) -> None:
    with Browser(tmp_path) as browser:
        browser.view(width, 900)
        browser.open((made / "profile.html").as_uri())
        browser.wait_for("document.querySelectorAll('svg.chart').length === 1")
        assert browser.js("document.documentElement.scrollWidth") <= width
        shown = browser.js("document.querySelector('.lead').textContent")
        assert "Most likely cause: more requests of tenant <b>loud</b> in T1" in shown


def test_without_since_the_window_ends_with_the_log(folder: Path, tmp_path: Path) -> None:
    words = ["profile", "--traffic-log", str(folder), "--out", str(tmp_path / "p")]
    assert main([*words, "--seconds", "60", "--before-s", "0"]) == 0
    found = json.loads((tmp_path / "p" / "profile.json").read_text())
    assert found["window"]["requests"] == pytest.approx(60 * 11, abs=11)
    assert found["before"]["requests"] == 0
    assert found["cause"]["kind"] == "unknown"


def test_a_time_may_be_written_as_people_do(folder: Path, tmp_path: Path) -> None:
    found = []
    for number, since in enumerate(
        ("2026-09-21T14:23:20Z", "2026-09-21T16:23:20+02:00", "2026-09-21 14:23:20")
    ):
        out = tmp_path / str(number)
        words = ["profile", "--traffic-log", str(folder), "--out", str(out), "--since", since]
        assert main(words) == 0
        found.append(json.loads((out / "profile.json").read_text())["window"]["since_unix_s"])
    assert found == [SINCE_UNIX_S] * 3


def test_what_never_began_or_never_ended_is_believed_of_the_others(tmp_path: Path) -> None:
    out = TrafficLog(tmp_path, engine="x", plan_digest="y", origin_unix_s=SINCE_UNIX_S)
    for n in range(40):
        shed = n % 2 == 1
        out.add(
            arrival_s=n * 1.0, tenant="acme", tier="T1", prompt_tokens=1000,
            output_tokens=0 if shed else 200, cached_tokens=0 if shed else 600,
            ttft_s=None if shed else 0.2, e2e_s=1.0, outcome="shed" if shed else "finished",
        )  # fmt: skip
    out.close()
    logged = read_logged(tmp_path, since_unix_s=SINCE_UNIX_S, window_s=60.0, before_s=0.0)
    (row,) = figures.who(figures.compare(logged))
    assert row["cached_share"] == pytest.approx(0.6)
    assert row["output_tokens_mean"] == pytest.approx(200.0)
    assert row["requests_per_s"] == pytest.approx(40 / 60)


def test_lost_rows_are_told(tmp_path: Path) -> None:
    turns = iter(range(100))

    def sometimes(table: object, path: Path) -> None:
        if next(turns) == 1:
            raise OSError(28, "No space left on device")
        pq.write_table(table, path)

    out = TrafficLog(
        tmp_path, engine="x", plan_digest="y", origin_unix_s=SINCE_UNIX_S, rows_per_file=10,
        write=sometimes,
    )  # fmt: skip
    for n in range(40):
        out.add(arrival_s=float(n), tenant="a", tier="T0", prompt_tokens=9, output_tokens=2)
        while n % 10 == 9 and out.written_rows + out.dropped_rows < n + 1:
            pass
    out.close()
    logged = read_logged(tmp_path, since_unix_s=SINCE_UNIX_S, window_s=60.0, before_s=0.0)
    assert (len(logged.trace), logged.lost_rows) == (30, 10)


def test_files_from_before_are_not_read(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("traffic-*.parquet"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "traffic-20200101T000000-1-000000.parquet").write_bytes(b"damaged")
    logged = read_logged(tmp_path, since_unix_s=SINCE_UNIX_S, window_s=120.0, before_s=600.0)
    assert len(logged.trace) > 1320


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--traffic-log", "nowhere"], "traffic_log_dir"),
        (["--seconds", "0.5"], "--seconds"),
        (["--before-s", "-1"], "--before-s"),
        (["--since", "yesterday"], "--since"),
        (["--since", "1e20"], "--since"),
        (["--since", "5"], "requests are logged when they end"),
        (["--alert", "LOG/traffic-x.json"], "--alert"),
        (["--out", "FILE"], "--out"),
    ],
)
def test_a_wrong_wish_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (tmp_path / "file").write_text("no JSON")
    usual = {"--traffic-log": str(folder), "--out": str(tmp_path / "out"), "--since": WORDS[1]}
    usual |= {words[0]: {"FILE": str(tmp_path / "file")}.get(words[1], words[1])}
    usual |= {"--alert": str(tmp_path / "file")} if words[0] == "--alert" else {}
    assert main(["profile", *(word for pair in usual.items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("at_s", "span_s", "most"),
    [([], 1.0, 0), ([0.0], 1.0, 1), ([0.0, 0.5, 1.0, 1.4], 1.0, 3), ([0.0, 1.0, 2.0], 1.0, 1)],
)
def test_a_peak_is_the_most_within_any_stretch(at_s: list[float], span_s: float, most: int) -> None:
    assert most_within(np.array(at_s), span_s) == most
