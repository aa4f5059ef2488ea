"""The daemon itself is killed, stopped, doubled, or has no disk to write to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="it comes with vLLM")

from tests.chaos.rig import SLACK_S, Rig, trial
from tests.live_parts import TRIMTAB, daemon
from tests.waiting import poll
from trimtab.engine_bridge.vllm.control_client import ControlClient

pytestmark = pytest.mark.slow
DISK = "1m"


def test_killed(rig: Rig) -> None:
    killed = rig.usual_daemon()
    with trial(rig, "daemon killed (SIGKILL), started again") as tried:
        killed.process.kill()
        killed.process.wait(10)
        tried.healed()
        # What starts it again need not wait for the lease of the one that died.
        rig.start_daemon()
        tried.look(lambda state: state["contact"] != "starting")
        tried.falls_back(rig.lease_s + SLACK_S)


def test_killed_and_not_started_again(rig: Rig) -> None:
    killed = rig.usual_daemon()
    with trial(rig, "daemon killed (SIGKILL), away for a while") as tried:
        killed.process.kill()
        killed.process.wait(10)
        tried.falls_back(rig.lease_s + SLACK_S)
        tried.stays_static(rig.lease_s)
        tried.healed()
        rig.start_daemon()
        tried.look(lambda state: state["contact"] != "starting")


def test_stopped_and_continued(rig: Rig) -> None:
    stopped = rig.usual_daemon()
    stop_s = float(os.environ.get("TRIMTAB_CHAOS_STOP_S", rig.lease_s + 2))
    with trial(rig, f"daemon paused (SIGSTOP) for {stop_s:g} s") as tried:
        begun_s = time.monotonic()
        stopped.process.send_signal(signal.SIGSTOP)
        try:
            tried.falls_back(rig.lease_s + SLACK_S)
            tried.stays_static(begun_s + stop_s - time.monotonic())
        finally:
            stopped.process.send_signal(signal.SIGCONT)
        tried.healed()
        # What it had decided before is old: it begins with a probation.
        tried.stays_static(rig.interval_s)
        tried.look()


def test_a_second_controller(rig: Rig, tmp_path: Path) -> None:
    first = rig.usual_daemon()
    with daemon(tmp_path / "second", rig.settings()) as second:
        with trial(rig, "two daemons; the first is killed") as tried:
            second.wait_for(lambda state: state["contact"] == "standby", what="a standby")
            holder = rig.watcher.now.holder
            assert second.state()["holder"] == first.state()["holder"] == holder
            tried.contact, tried.shown = "standby", second.state()["headline"]
            tried.acts_on(2 * rig.interval_s)
            tried.begins()
            first.process.kill()
            first.process.wait(10)
            tried.healed()
            tried.falls_back(rig.lease_s + SLACK_S)
            rig.daemon = second
        assert rig.watcher.now.holder != holder
        second.process.terminate()
        second.process.wait(20)
        # It gave its lease back: nobody has to wait for it.
        with ControlClient(rig.server.folder / "control.sock") as control:
            assert control.get()["state"] == "static"
    rig.end_daemon()


def test_the_disk_is_full(rig: Rig, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    inside = ["unshare", "--mount", *(() if os.getuid() == 0 else ("--map-root-user",))]
    mount = f'mount -t tmpfs -o size={DISK} none "{state}"'
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "sh", "-c", mount], capture_output=True).returncode
    ):
        pytest.skip("this machine lets nobody mount a small disk")
    program = (*inside, "sh", "-c", f'{mount} && exec "$0" "$@"', *TRIMTAB)
    started = rig.start_daemon(program=program, state_dir=str(state))
    disk = Path(f"/proc/{started.process.pid}/root{state}")
    with trial(rig, "disk of the audit log full") as tried:
        poll(lambda: len(numbers(disk)) > 3, what="entries")
        filler = disk / "filler"
        fill(filler)
        before = len(numbers(disk))
        tried.acts_on(6 * rig.interval_s)
        tried.look(lambda state: state["detail"] != "")
        assert len(numbers(disk)) <= before + 1
        filler.unlink()
        tried.healed()
        poll(lambda: len(numbers(disk)) > before + 6, what="the entries that had waited")
        # Nothing is missing, nothing is there twice.
        found = numbers(disk)
        assert found == list(range(1, len(found) + 1))
    rig.end_daemon()


def fill(path: Path) -> None:
    """Write until nothing more fits."""
    with path.open("wb", buffering=0) as file:
        for size in (65536, 4096, 512, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue


def numbers(disk: Path) -> list[int]:
    """The numbers of the decisions in the audit log, as they stand there."""
    found = []
    for path in sorted((disk / "audit").rglob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # The end of a line has not been written yet.
            if entry.get("kind") == "decision":
                found.append(int(entry["number"]))
    return found
