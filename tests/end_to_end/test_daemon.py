"""`trimtab run` beside a real server: it steers, shows true figures, can be replayed."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")

from tests.chaos.rig import GUARD
from tests.chaos.steady_load import SteadyLoad
from tests.end_to_end.test_metrics import samples, total
from tests.live_parts import TRIMTAB, DaemonProcess, daemon
from tests.vllm_server import Server
from tests.waiting import poll
from trimtab.engine_bridge.vllm.control_client import ControlClient

pytestmark = pytest.mark.slow
MOST_RESIDENT_KIB = 150 * 1024
CHANGES = 10


def resident_kib(started: DaemonProcess) -> int:
    lines = Path(f"/proc/{started.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_it_steers_an_engine_and_its_log_replays(server: Server, tmp_path: Path) -> None:
    engine = {
        "plan": str(server.folder / "plan.yaml"),
        "control": str(server.folder / "control.sock"),
        "metrics": f"{server.url}/metrics",
    }
    settings = {"mode": "active", "guard": GUARD, "engines": {"a": engine}}
    load = SteadyLoad(server)
    load.start()
    before = samples(server)
    with ControlClient(server.folder / "control.sock") as control:
        with daemon(tmp_path, settings) as started:
            first = control.get()["version"]
            poll(lambda: control.get()["version"] > first + CHANGES, what="changes")
            state = started.state()
            assert state["contact"] == "controlling"
            assert state["applied"]["weights"] != state["static"]["weights"]
            assert state["holder"] == control.get()["holder"]
            shown = {tier["tier"]: tier["judged"] for tier in state["tiers"]}
            assert resident_kib(started) < MOST_RESIDENT_KIB
        # It gave the lease back: the static plan holds at once.
        assert control.get()["state"] == "static"
    load.close()
    assert load.check() == load.sent
    # What it showed is what the engine told everybody since it began.
    time.sleep(1)
    after = samples(server)
    for tier in ("T0", "T3"):
        name, label = "trimtab_judged_total", f'tier="{tier}"'
        assert 0 < shown[tier] <= total(after, name, label) - total(before, name, label)
    assert shown["T1"] == shown["T2"] == 0
    replay = subprocess.run(
        [*TRIMTAB, "whatif", "--audit", str(tmp_path / "state" / "audit")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert replay.returncode == 0, replay.stdout + replay.stderr
