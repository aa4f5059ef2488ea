"""One emulated vLLM server for all tests that need one: a start costs a minute of CPU.

It is a real `trimtab serve --emulate`; tests that must do it harm start their own with `running`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import free_port, poll
from trimtab.engine_bridge import plan as plan_package

ENGINE = "h100:llama-3.1-70b-tp8"
MODEL = ENGINE.rpartition(":")[2]
"""What clients call it."""
START_S = 900.0
STOP_S = 60.0
TIME_SCALE = "0.1"  # a step of a millisecond: fast, and still a stream of single tokens
INTERVAL_S = 0.5  # of control and telemetry: what takes intervals is soon over
_STAMP = re.compile(r"^(\([^)]*\) )?([A-Z]+ \d\d-\d\d [\d:]+ \[[^]]*\] ?)?")
KEYS = {
    "acme": ("sk-acme", "T0"),
    "bolt": ("sk-bolt", "T0"),
    "crowd": ("sk-crowd", "T3"),
    "odd": ("sk-odd", "T2"),
}


@dataclass(frozen=True)
class Server:
    """A running server and what a client needs to know of it."""

    url: str
    model: str
    log: Path
    folder: Path
    """Where `plan.yaml`, `control.sock` and the logs' folders `steps` and `traffic` are."""
    process: subprocess.Popen[bytes]

    def bearer(self, tenant: str) -> dict[str, str]:
        """The header that proves a tenant."""
        return {"Authorization": f"Bearer {KEYS[tenant][0]}"}


# Whatever level other tests have set for their own vLLM.
LOUD = {"VLLM_LOGGING_LEVEL": "INFO"}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`trimtab serve --emulate` as a user starts it, with fast steps."""
    with running(tmp_path_factory.mktemp("server")) as started:
        yield started


@contextmanager
def running(
    folder: Path,
    *flags: str,
    serves: Sequence[str] = (),
    time_scale: str = TIME_SCALE,
    env: Mapping[str, str] | None = None,
    port: int | None = None,
    trust_labels: bool = False,
    odd_requests: bool = False,
) -> Iterator[Server]:
    """A server with its files in a folder, which may be that of an earlier one.

    `serves` names another model than the emulated engine's; clients must know it as `MODEL`.

    With `odd_requests` vLLM may log faults of its own about them; one of ours fails all the same.
    """
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    import httpx

    port, log = port or free_port(), folder / "server.log"
    metrics = folder / "metrics"
    metrics.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "trimtab.controller.cli.app", "serve"),
        *(serves or ("--emulate", ENGINE, "--time-scale", time_scale)),
        *(("--trust-labels",) if trust_labels else ("--keys", str(_keys_file(folder)))),
        *("--plan", str(write_plan(folder, interval_s=INTERVAL_S))),
        *("--control-socket", str(folder / "control.sock")),
        *("--step-log", str(folder / "steps"), "--traffic-log", str(folder / "traffic")),
        *("--host", "127.0.0.1", "--port", str(port), "--enable-log-requests", *flags),
    ]
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=os.environ | LOUD | {"PROMETHEUS_MULTIPROC_DIR": str(metrics)} | dict(env or {}),
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"

    def healthy() -> bool:
        assert process.poll() is None, f"it ended:\n{_tail(log)}"
        try:
            return httpx.get(f"{url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    try:
        poll(healthy, what=f"the server's start, {log}", deadline_s=START_S, every_s=0.5)
        yield Server(url, MODEL, log, folder, process)
        _stops_cleanly(process, log, odd_requests=odd_requests)
    finally:
        _kill_group(process)


def own_faults(log: Path) -> list[str]:
    """The tracebacks in a log that run through our code."""
    lines = [_STAMP.sub("", line) for line in log.read_text(errors="replace").splitlines()]
    found = []
    for number, line in enumerate(lines):
        if "Traceback (most recent" in line:
            after = lines[number + 1 :]
            frames = itertools.takewhile(lambda one: not one or one[0].isspace(), after)
            found.append("\n".join((line, *frames)))
    return [one for one in found if "engine_bridge" in one]


def _stops_cleanly(process: subprocess.Popen[bytes], log: Path, *, odd_requests: bool) -> None:
    """On SIGTERM the server ends by itself and leaves no process of its group behind."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"SIGTERM did not end it within {STOP_S:g} s:\n{_tail(log)}")
    poll(lambda: not _group_lives(process.pid), what="the end of its children", deadline_s=STOP_S)
    # vLLM's API process may note with a traceback that the engine it has ended is gone.
    if odd_requests:
        assert not own_faults(log)
        return
    lines = log.read_text(errors="replace").splitlines()
    faults = [line for line in lines if "Traceback" in line and "async_llm.py" not in line]
    assert not faults, _tail(log)


def _group_lives(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(STOP_S)


def _keys_file(folder: Path) -> Path:
    path = folder / "keys.yaml"
    lines = [
        f"{tenant}: {{tier: {tier}, keys_sha256: [{hashlib.sha256(key.encode()).hexdigest()}]}}"
        for tenant, (key, tier) in KEYS.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_plan(folder: Path, *, interval_s: float = 2.0, patient: bool = True) -> Path:
    """The shipped plan with another control interval, as a file.

    Args:
        folder: Where `plan.yaml` is written.
        interval_s: Control interval, seconds.
        patient: Give nobody up: a busy machine is slower than any target.
    """
    text = (Path(plan_package.__file__).parent / "default.yaml").read_text()
    changes = [("interval_s: 2", f"interval_s: {interval_s:g}")]
    if patient:
        changes.append(("late_shedding: true", "late_shedding: false"))
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = folder / "plan.yaml"
    path.write_text(text)
    return path


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
