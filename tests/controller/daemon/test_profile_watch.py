"""The daemon has the traffic profiled: when, for how long, and never in a tick's way.

Server, log, client and the profiling process are the real ones; only the clock is the test's.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine_bridge.vllm.sample_telemetry import telemetry, tier
from trimtab.controller.daemon import profile_watch
from trimtab.controller.daemon.profile_watch import (
    LEAD_S,
    MOST_PROFILES,
    ProfileWatch,
    flush_traffic_log,
)
from trimtab.engine_bridge.plan import load_plan
from trimtab.engine_bridge.vllm.control_errors import ControlUnavailableError
from trimtab.engine_bridge.vllm.control_server import ControlServer
from trimtab.engine_bridge.vllm.control_store import AllocationStore
from trimtab.engine_bridge.vllm.traffic_log import TrafficLog

PLAN = load_plan()
UNIX_S = 1_790_000_000.0
INTERVAL_S = 2.0


@dataclass(frozen=True)
class Settings:
    baseline_factor: float = 3.0
    for_s: float = 30.0
    sample_s: float = 60.0
    at_most_every_s: float = 3600.0


@dataclass
class Engine:
    """A watch with a clock; what it starts is kept until the test runs it."""

    folder: Path
    flush: Callable[[], None] = lambda: None
    settings: Settings = Settings()
    time_out_s: float = 120.0
    now_s: float = 500.0
    jump_s: float = 0.0
    jobs: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.watch = ProfileWatch(
            PLAN,
            self.settings,
            engine="a",
            traffic_log=self.folder / "log",
            out=self.folder / "profiles",
            flush=self.flush,
            monotonic_s=lambda: self.now_s,
            start=self.jobs.append,
            time_out_s=self.time_out_s,
        )

    def intervals(self, seconds: float, p99_ms: float) -> Engine:
        for _ in range(int(seconds / INTERVAL_S)):
            self.now_s += INTERVAL_S
            seen = tier(ttft_ms_p99=p99_ms, queue_length=3, running=2)
            unix_s = UNIX_S + self.now_s + self.jump_s
            self.watch.see(telemetry(PLAN, seen, time_s=self.now_s), unix_s)
        return self

    def until_slow(self) -> Engine:
        """Half an hour of quick answers, then slow ones until traffic is being collected."""
        self.intervals(1800, 200.0)
        while not self.watch.busy:
            self.intervals(2, 2000.0)
        return self


def write_log(folder: Path, *, seconds: float) -> TrafficLog:
    """A log of one request a second, up to now; the last ones are not in a file yet."""
    log = TrafficLog(
        folder,
        engine="x",
        plan_digest="y",
        origin_unix_s=UNIX_S,
        rows_per_file=10**6,
        longest_s=1e9,
    )
    for second in range(int(seconds)):
        log.add(
            arrival_s=float(second), tenant="acme", tier="T0", prompt_tokens=100, output_tokens=20,
            ttft_s=0.2, e2e_s=1.0,
        )  # fmt: skip
    return log


def test_a_slow_tier_gives_a_profile_of_the_time_around_it(tmp_path: Path) -> None:
    sock = tmp_path / "control.sock"
    engine = Engine(tmp_path, flush=lambda: flush_traffic_log(sock))
    engine.until_slow()
    found_s = engine.now_s
    assert engine.jobs == []
    engine.intervals(58, 2000.0)
    assert engine.jobs == [], "it collects for a minute"
    engine.intervals(4, 2000.0)
    (job,) = engine.jobs
    log = write_log(tmp_path / "log", seconds=engine.now_s)
    store = AllocationStore(PLAN, capacity_max_num_seqs=64)
    with ControlServer(store, path=sock, flush=log.flush_counted):
        job()
    log.close()
    assert engine.watch.detail == ""
    page = Path(engine.watch.profile)
    assert page.name == "profile.html"
    assert "acme" in page.read_text()
    content = json.loads((page.parent / "profile.json").read_text())
    window = content["window"]
    assert window["since_unix_s"] == pytest.approx(UNIX_S + found_s - 30.0 - LEAD_S, abs=12.0)
    ends_unix_s = window["since_unix_s"] + window["seconds"]
    assert ends_unix_s == pytest.approx(UNIX_S + engine.now_s, abs=3.0)
    # The last requests were in no file before the flush.
    assert window["requests"] == pytest.approx(window["seconds"], abs=2)
    assert content["alert"]["tier"] == "T0"
    assert content["alert"]["p99_ttft_ms"] == 2000.0
    assert content["alert"]["baseline_ms"] == 200.0
    assert content["alert"]["waiting"]["T0"] == 3
    assert page.parent.stat().st_mode & 0o077 == 0


def test_a_jump_of_the_clock_moves_no_window(tmp_path: Path) -> None:
    engine = Engine(tmp_path).until_slow()
    engine.jump_s = -86_400.0
    engine.intervals(62, 2000.0)
    write_log(tmp_path / "log", seconds=engine.now_s).close()
    engine.jobs[0]()
    found = json.loads((Path(engine.watch.profile).parent / "profile.json").read_text())
    assert found["window"]["seconds"] == pytest.approx(30.0 + LEAD_S + 60.0, abs=3.0)


def test_at_most_one_in_an_hour(tmp_path: Path) -> None:
    engine = Engine(tmp_path).until_slow()
    for _ in range(5):
        engine.intervals(300, 200.0).intervals(120, 2000.0)
        for job in engine.jobs[:1]:
            job.__self__.over = True  # type: ignore[attr-defined]
    assert len(engine.jobs) == 1
    engine.intervals(1800, 200.0).intervals(120, 2000.0)
    assert len(engine.jobs) == 2


def test_while_one_is_made_no_other_begins(tmp_path: Path) -> None:
    engine = Engine(tmp_path, settings=Settings(at_most_every_s=1.0)).until_slow()
    for _ in range(5):
        engine.intervals(120, 200.0).intervals(120, 2000.0)
    assert len(engine.jobs) == 1
    assert engine.watch.busy


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_does_not_answer_leaves_what_is_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    if answers:
        monkeypatch.setattr(profile_watch.ControlClient, "flush", lambda self: {"no": "rows"})
    engine = Engine(tmp_path, flush=lambda: flush_traffic_log(tmp_path / "nobody.sock"))
    engine.until_slow().intervals(62, 2000.0)
    write_log(tmp_path / "log", seconds=engine.now_s).close()
    engine.jobs[0]()
    assert engine.watch.profile != ""


def test_without_a_log_the_reason_is_told_and_the_watch_goes_on(tmp_path: Path) -> None:
    engine = Engine(tmp_path).until_slow().intervals(62, 2000.0)
    engine.jobs[0]()
    assert engine.watch.profile == ""
    assert "traffic_log_dir" in engine.watch.detail
    assert not engine.watch.busy


def test_a_profile_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    engine = Engine(tmp_path, time_out_s=0.05).until_slow().intervals(62, 2000.0)
    began_s = time.monotonic()
    engine.jobs[0]()
    assert time.monotonic() - began_s < 20.0
    assert "longer than 0.05 s" in engine.watch.detail
    assert children() == []


def test_closing_ends_what_runs_and_what_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    slow = tmp_path / "slow.sh"
    slow.write_text(f"#!/bin/sh\ntouch {started}\nsleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(profile_watch.sys, "executable", str(slow))
    engine = Engine(tmp_path).until_slow().intervals(62, 2000.0)
    thread = threading.Thread(target=engine.jobs[0])
    thread.start()
    until_s = time.monotonic() + 30.0
    while not started.exists():
        assert time.monotonic() < until_s
        time.sleep(0.01)
    engine.watch.close()
    thread.join(10.0)
    assert not thread.is_alive()
    assert (engine.watch.profile, engine.watch.detail) == ("", "")
    started.unlink()
    engine.jobs[0]()
    assert not started.exists()


def test_the_process_yields_to_everything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow.sh"
    slow.write_text('#!/bin/sh\nsleep 0.3\nps -o ni= -p $$ > "$0.nice"\n')
    slow.chmod(0o755)
    monkeypatch.setattr(profile_watch.sys, "executable", str(slow))
    engine = Engine(tmp_path).until_slow().intervals(62, 2000.0)
    engine.jobs[0]()
    assert int((tmp_path / "slow.sh.nice").read_text()) == 19


def test_the_process_gets_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shows = tmp_path / "shows.sh"
    shows.write_text('#!/bin/sh\nenv > "$0.env"\n')
    shows.chmod(0o755)
    monkeypatch.setattr(profile_watch.sys, "executable", str(shows))
    for name in ("CONTROL_TOKEN", "DAEMON_TOKEN", "ENGINE_KEY", "EMULATE"):
        monkeypatch.setenv(f"TRIMTAB_{name}", "x")
    engine = Engine(tmp_path).until_slow().intervals(62, 2000.0)
    engine.jobs[0]()
    lines = (tmp_path / "shows.sh.env").read_text().splitlines()
    assert [line for line in lines if line.startswith("TRIMTAB_")] == ["TRIMTAB_EMULATE=x"]
    assert any(line.startswith("PATH=") for line in lines)


def test_a_tick_costs_microseconds(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    ticks = 3000
    began_s = time.process_time()
    engine.intervals(ticks * INTERVAL_S, 200.0)
    # Two thirds of it is the test's own telemetry; a slow machine has room.
    assert (time.process_time() - began_s) / ticks < 2e-3


def test_ticks_without_telemetry_are_no_matter(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.watch.see(None, UNIX_S)
    assert not engine.watch.busy


def test_the_oldest_profiles_go(tmp_path: Path) -> None:
    for number in range(MOST_PROFILES + 5):
        (tmp_path / "profiles" / f"a-20260101T{number:06d}Z").mkdir(parents=True)
    other = tmp_path / "profiles" / "a-b-20260101T000000Z"
    other.mkdir()
    engine = Engine(tmp_path).until_slow().intervals(62, 2000.0)
    write_log(tmp_path / "log", seconds=engine.now_s).close()
    engine.jobs[0]()
    kept = sorted(path.name for path in (tmp_path / "profiles").glob("a-2*"))
    assert len(kept) == MOST_PROFILES
    assert Path(engine.watch.profile).parent.name == kept[-1]
    assert other.exists()


def test_a_flush_waits_for_the_writer_and_not_for_ever(tmp_path: Path) -> None:
    counts = {"handed_over_rows": 5, "written_rows": 0, "dropped_rows": 0}
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            counts.update(written_rows=4, dropped_rows=1)

    store = AllocationStore(PLAN, capacity_max_num_seqs=64)
    sock = tmp_path / "control.sock"
    with ControlServer(store, path=sock, flush=lambda: counts):
        flush_traffic_log(sock, wait=wait)
        assert len(waits) == 3
        counts.update(handed_over_rows=99)
        waits.clear()
        flush_traffic_log(sock, wait=wait)
        assert sum(waits) == pytest.approx(10.0)
    with pytest.raises(ControlUnavailableError):
        flush_traffic_log(sock, wait=wait)


def children() -> list[Any]:
    """Processes that this one has started and not buried."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    found = []
    for pid in path.read_text().split():
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"profile" in words:
            found.append(words)
    return found
