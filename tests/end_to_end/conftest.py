"""One emulated server for the whole session: a start costs a minute of CPU."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from trimtab.engine_bridge import plan

ENGINE = "h100:llama-3.1-70b-tp8"
START_S = 900.0
STOP_S = 60.0
TIME_SCALE = "0.1"  # a step of a millisecond: fast, and still a stream of single tokens
KEYS = {
    "acme": ("sk-acme", "T0"),
    "bolt": ("sk-bolt", "T0"),
    "crowd": ("sk-crowd", "T3"),
}


@dataclass(frozen=True)
class Server:
    """A running server and what a client needs to know of it."""

    url: str
    model: str
    log: Path
    folder: Path
    """Where `control.sock` and the logs' folders `steps` and `traffic` are."""
    process: subprocess.Popen[bytes]

    def bearer(self, tenant: str) -> dict[str, str]:
        """The header that proves a tenant."""
        return {"Authorization": f"Bearer {KEYS[tenant][0]}"}


def poll(
    found: Callable[[], bool], *, what: str, deadline_s: float = 60.0, every_s: float = 0.05
) -> None:
    """Wait until something is so; a wait that ends without it is a failure."""
    end_s = time.monotonic() + deadline_s
    while not found():
        assert time.monotonic() < end_s, f"{what}: not within {deadline_s:g} s"
        time.sleep(every_s)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


# Whatever level other tests have set for their own vLLM.
LOUD = {"VLLM_LOGGING_LEVEL": "INFO"}


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`trimtab serve --emulate` as a user starts it, with fast steps."""
    with running(tmp_path_factory.mktemp("server")) as started:
        yield started


@contextmanager
def running(
    folder: Path, *flags: str, time_scale: str = TIME_SCALE, env: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """A server with its files in a folder, which may be that of an earlier one."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    import httpx

    port, log = free_port(), folder / "server.log"
    metrics = folder / "metrics"
    metrics.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "trimtab.controller.cli.app", "serve", "--emulate", ENGINE),
        *("--time-scale", time_scale, "--keys", str(_keys_file(folder))),
        *("--plan", str(_patient_plan(folder))),
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
        yield Server(url, ENGINE.rpartition(":")[2], log, folder, process)
        _stops_cleanly(process, log)
    finally:
        _kill_group(process)


def _stops_cleanly(process: subprocess.Popen[bytes], log: Path) -> None:
    """On SIGTERM the server ends by itself and leaves no process of its group behind."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pytest.fail(f"SIGTERM did not end it within {STOP_S:g} s:\n{_tail(log)}")
    poll(lambda: not _group_lives(process.pid), what="the end of its children", deadline_s=STOP_S)
    # vLLM's API process may note with a traceback that the engine it has ended is gone.
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


def _patient_plan(folder: Path) -> Path:
    """The shipped plan that gives nobody up: a busy machine is slower than any target."""
    text = (Path(plan.__file__).parent / "default.yaml").read_text()
    assert "late_shedding: true" in text
    path = folder / "plan.yaml"
    path.write_text(text.replace("late_shedding: true", "late_shedding: false"))
    return path


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])
