"""The daemon as a process and as an object, beside engines with real sockets and pages."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.live_parts import StandIn, daemon, poll, traffic, write_plan
from trimtab.agents.verdict import GuardMode, Verdict
from trimtab.controller.daemon.command import Command, CommandKind
from trimtab.controller.daemon.daemon import FAULTS_TO_REPLACE, Daemon
from trimtab.controller.daemon.settings import settings_from
from trimtab.controller.daemon.state import Contact
from trimtab.engine_bridge.allocation import Allocation

INTERVAL_S = 0.25
HEAVY = (
    "matplotlib", "mlflow", "numba", "optuna", "pandas", "pyarrow", "scipy", "sklearn",
    "stable_baselines3", "torch", "vllm",
)  # fmt: skip
MOST_RESIDENT_MIB = 150
RUN = [sys.executable, "-m", "trimtab.controller.cli.app", "run"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan(tmp_path_factory.mktemp("plan"), interval_s=INTERVAL_S)


@pytest.fixture
def engine(tmp_path: Path, plan: Path) -> Iterator[StandIn]:
    with StandIn(tmp_path, plan, traffic(load=0.3, hours=0.1)) as engine:
        yield engine


def settings_for(engine: StandIn, plan: Path, **more: Any) -> dict[str, Any]:
    return {
        "mode": "active",
        "guard": {"probation_s": 1.0, "ramp_s": 0.5},
        "engines": {
            "a": {
                "plan": str(plan),
                "control": str(engine.control_path),
                "metrics": engine.metrics_url,
            }
        },
        **more,
    }


def controlling(state: dict[str, Any]) -> bool:
    return bool(state["contact"] == Contact.CONTROLLING)


def held_by(engine: StandIn) -> str | None:
    return engine.store.describe().holder


def is_static(engine: StandIn) -> bool:
    static = Allocation.static(engine.plan)
    return engine.store.describe().allocation.weights == static.weights


def audit_of(folder: Path) -> list[dict[str, Any]]:
    lines = [p.read_text().splitlines() for p in sorted((folder / "state").glob("audit/*.jsonl"))]
    return [json.loads(line) for file in lines for line in file]


def test_it_is_small_and_imports_nothing_heavy(tmp_path: Path, engine: StandIn, plan: Path) -> None:
    settings = settings_for(engine, plan, policy="learned")
    env = {"PYTHONPROFILEIMPORTTIME": "1"}
    with daemon(tmp_path / "daemon", settings, env=env) as running:
        running.wait_for(lambda state: state["ticks"] > 20, what="twenty ticks")
        status = Path(f"/proc/{running.process.pid}/status").read_text()
        log = running.log
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    assert int(found[1]) / 1024 < MOST_RESIDENT_MIB
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in log.splitlines()
                if line.startswith("import time:")}  # fmt: skip
    assert {"trimtab", "uvicorn", "numpy"} <= imported, "the list of imports is real"
    assert not imported & set(HEAVY)
    assert "trimtab.training" not in log


def test_signals_hold_release_and_reload_and_end_it_cleanly(
    tmp_path: Path, engine: StandIn, plan: Path
) -> None:
    folder = tmp_path / "daemon"
    with daemon(folder, settings_for(engine, plan)) as running:
        running.wait_for(controlling, what="control")
        for number, mode in (
            (signal.SIGUSR1, GuardMode.HOLD),
            (signal.SIGUSR2, GuardMode.ACTIVE),
        ):
            running.process.send_signal(number)
            running.wait_for(lambda state, mode=mode: state["mode"] == mode, what=mode)
        running.process.send_signal(signal.SIGHUP)
        running.wait_for(lambda state: "reload" in running.log, what="reload")
        assert held_by(engine) is not None
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(15) == 0
    assert held_by(engine) is None
    assert is_static(engine)
    commands = [(e["command"], e["by"]) for e in audit_of(folder) if e["kind"] == "command"]
    assert commands == [
        ("hold", "signal SIGUSR1"), ("release", "signal SIGUSR2"), ("reload", "signal SIGHUP")
    ]  # fmt: skip


def test_a_second_controller_waits_or_leaves_and_takes_over_when_the_first_one_is_gone(
    tmp_path: Path, engine: StandIn, plan: Path
) -> None:
    settings = settings_for(engine, plan)
    with daemon(tmp_path / "first", settings) as first:
        first.wait_for(controlling, what="control")
        owner = held_by(engine)
        with daemon(tmp_path / "second", settings) as second:
            second.wait_for(lambda state: state["contact"] == Contact.STANDBY, what="standby")
            assert second.state()["holder"] == owner
            flags = ["--control", str(engine.control_path), "--metrics", engine.metrics_url]
            third = subprocess.run(
                [*RUN, *flags, "--plan", str(plan), "--listen", "none", "--no-wait"],
                capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
            )  # fmt: skip
            assert third.returncode == 1
            assert f"engine engine: {owner} holds its lease" in third.stderr.splitlines()[-1]
            assert held_by(engine) == owner
            first.process.kill()
            second.wait_for(controlling, what="take-over")
            assert held_by(engine) not in (None, owner)


@pytest.fixture
def made(tmp_path: Path, engine: StandIn, plan: Path) -> Iterator[Callable[..., Daemon]]:
    """Daemons in this process, without a dashboard, that end with the test."""
    running: list[Daemon] = []

    def make(**more: Any) -> Daemon:
        values = settings_for(engine, plan, listen=None, state_dir=str(tmp_path / "state"), **more)
        daemon = Daemon(settings_from(values, where="test"))
        running.append(daemon)
        daemon.start()
        return daemon

    yield make
    for one in running:
        one.stop()


def wait_for(found: Callable[[], bool], what: str) -> None:
    poll(found, what=what, deadline_s=30.0)


def test_a_loop_that_only_fails_is_made_anew_and_what_was_ordered_stays(
    made: Callable[..., Daemon], engine: StandIn
) -> None:
    daemon = made()
    wait_for(lambda: daemon.states()["a"].contact is Contact.CONTROLLING, "control")
    daemon.command("a", Command(kind=CommandKind.HOLD, by="test"))
    wait_for(lambda: daemon.states()["a"].mode is GuardMode.HOLD, "hold")
    broken = daemon.loops["a"]
    broken._guard.decide = lambda telemetry: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    wait_for(lambda: daemon.loops["a"] is not broken, "a new loop")
    wait_for(lambda: daemon.states()["a"].contact is Contact.CONTROLLING, "control again")
    state = daemon.states()["a"]
    assert state.faults == FAULTS_TO_REPLACE
    assert state.mode is GuardMode.HOLD
    assert held_by(engine) is not None


def test_what_is_ordered_while_a_loop_only_fails_outlives_it(made: Callable[..., Daemon]) -> None:
    daemon = made(mode="active")
    wait_for(lambda: daemon.states()["a"].contact is Contact.CONTROLLING, "control")
    broken = daemon.loops["a"]
    broken._guard.decide = lambda telemetry: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    broken.command(Command(kind=CommandKind.MODE, mode=GuardMode.STATIC, by="test"))
    wait_for(lambda: daemon.loops["a"] is not broken, "a new loop")
    assert daemon.states()["a"].mode is GuardMode.STATIC


def test_a_latch_outlives_a_loop_that_only_fails(made: Callable[..., Daemon]) -> None:
    daemon = made(mode="active")
    wait_for(lambda: daemon.states()["a"].contact is Contact.CONTROLLING, "control")
    broken = daemon.loops["a"]
    broken._guard._recovery.latched = True
    broken._guard.decide = lambda telemetry: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    wait_for(lambda: daemon.loops["a"] is not broken, "a new loop")
    assert daemon.states()["a"].mode is GuardMode.STATIC


def test_an_order_that_came_as_a_loop_failed_for_good_is_carried_out_by_the_next(
    made: Callable[..., Daemon],
) -> None:
    daemon = made(mode="active")
    wait_for(lambda: daemon.states()["a"].contact is Contact.CONTROLLING, "control")
    broken = daemon.loops["a"]

    def fail(telemetry: object) -> Verdict:
        if broken.faults_in_a_row == FAULTS_TO_REPLACE - 1:
            daemon.command("a", Command(kind=CommandKind.HOLD, by="test"))
        raise ZeroDivisionError

    broken._guard.decide = fail  # type: ignore[method-assign]
    wait_for(lambda: daemon.loops["a"] is not broken, "a new loop")
    wait_for(lambda: daemon.states()["a"].mode is GuardMode.HOLD, "hold")


def test_a_disk_that_takes_nothing_keeps_no_engine_from_its_controller(
    tmp_path: Path, engine: StandIn, plan: Path
) -> None:
    (tmp_path / "no-folder").write_text("a file")
    settings = settings_for(engine, plan, state_dir=str(tmp_path / "no-folder" / "state"))
    env = {"TRIMTAB_DAEMON_TOKEN": "a-token-for-tests-0123456789"}
    with daemon(tmp_path / "daemon", settings, env=env) as running:
        running.wait_for(controlling, what="control")
        running.wait_for(lambda state: "audit log" in state["detail"], what="word of the disk")


def test_an_engine_that_hangs_keeps_no_other_one_waiting(
    made: Callable[..., Daemon], tmp_path: Path, engine: StandIn, plan: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf.sock"))
        deaf.listen(64)
        engines = {
            "deaf": {
                "plan": str(plan),
                "control": str(tmp_path / "deaf.sock"),
                "metrics": "http://127.0.0.1:9/metrics",
            },
            **settings_for(engine, plan)["engines"],
        }
        daemon = made(engines=engines)
        wait_for(lambda: daemon.states()["a"].ticks >= 20, "twenty ticks")
        states = daemon.states()
        assert states["a"].contact is Contact.CONTROLLING
        assert states["deaf"].contact is Contact.STARTING
        start_s = time.monotonic()
        daemon.stop()
        assert time.monotonic() - start_s < 10.0
    assert held_by(engine) is None


def test_checking_starts_nothing(tmp_path: Path, engine: StandIn, plan: Path) -> None:
    flags = ["--control", str(engine.control_path), "--metrics", engine.metrics_url, "--check"]
    done = subprocess.run(
        [*RUN, *flags, "--plan", str(plan)],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "in order" in done.stdout
    assert not (tmp_path / "state").exists()
    assert held_by(engine) is None
    done = subprocess.run(
        [*RUN, *flags, "--plan", str(plan)], env=os.environ | {"TRIMTAB_DAEMON_TOKEN": "short"},
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "TRIMTAB_DAEMON_TOKEN: must be at least 16 ASCII characters" in done.stderr


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "trimtab: run: must be told its engines; give --config FILE, or --control"),
        (["--control", "x"], "must be the URL of the engine's /metrics"),
        (["--config", "x.yaml", "--mode", "active"], "--mode: must be left out with --config"),
        (["--control", "x", "--match", "job=vllm"], "--match: \"job=vllm\", must be label=value"),
        (["--control", "x", "--metrics", "http://h/metrics", "--plan", "defualt"],
         'did you mean "default"?'),
        (["--control", "tcp://h", "--metrics", "http://h/metrics"], "host:port"),
        (["--control", "x", "--metrics", "http://h/metrics", "--listen", "h", "--check"],
         'listen: "h", must be host:port'),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line(tmp_path: Path, flags: list[str], line: str) -> None:
    done = subprocess.run(
        [*RUN, *flags], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1
