"""`trimtab gateway` and small engines as processes of their own, as an operator starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.engine_bridge.gateway import engine_app
from tests.waiting import free_port, poll

START_S = 120.0
STOP_S = 30.0


@dataclass
class EngineProcess:
    """One small engine."""

    name: str
    url: str
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(STOP_S)

    def counts(self) -> dict[str, Any]:
        """What it was asked."""
        found: dict[str, Any] = httpx.get(f"{self.url}/counts", timeout=10).json()
        return found

    def begun(self) -> int:
        """How many requests it has begun with."""
        return int(httpx.get(f"{self.url}/counts?brief=1", timeout=10).json()["begun"])

    def forget_most(self) -> None:
        """Begin to count anew how many run at once."""
        httpx.post(f"{self.url}/forget-most", timeout=10)


@dataclass
class GatewayProcess:
    """A gateway."""

    url: str
    admin: str
    config: Path
    log: Path
    process: subprocess.Popen[bytes]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        total = 0.0
        for line in httpx.get(f"{self.admin}/metrics", timeout=10).text.splitlines():
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(
                f'{key}="{one}"' in series for key, one in labels.items()
            ):
                total += float(value)
        return total

    def change(self, settings: Mapping[str, Any]) -> None:
        """Write other settings and have them read."""
        before = self.log.read_text().count("settings read")
        self.config.write_text(yaml.safe_dump(dict(settings)))
        self.process.send_signal(signal.SIGHUP)
        poll(
            lambda: self.log.read_text().count("settings read") > before,
            what="the settings are read",
        )


def _up(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "it ended"
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


@contextmanager
def engine_process(name: str, *, token_s: float = 0.01) -> Iterator[EngineProcess]:
    """A small engine that listens."""
    port = free_port()
    command = [sys.executable, engine_app.__file__, str(port), name, str(token_s)]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        poll(lambda: _up(f"{url}/health", process), what=f"engine {name}", deadline_s=START_S)
        yield EngineProcess(name, url, process)
    finally:
        process.kill()
        process.wait(STOP_S)


@contextmanager
def gateway_process(
    folder: Path, settings: dict[str, Any], *, env: Mapping[str, str] | None = None
) -> Iterator[GatewayProcess]:
    """A gateway that is ready; at the end it must stop cleanly."""
    port, admin_port = free_port(), free_port()
    settings |= {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{admin_port}"}
    config, log = folder / "gateway.yaml", folder / "gateway.log"
    config.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "trimtab.controller.cli.app", "gateway"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--config", str(config)],
            cwd=folder, stdout=out, stderr=subprocess.STDOUT, env=os.environ | dict(env or {}),
        )  # fmt: skip
    url, admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}"
    try:
        poll(
            lambda: _up(f"{admin}/readyz", process), what=f"the gateway, {log}", deadline_s=START_S
        )
        yield GatewayProcess(url, admin, config, log, process)
        killed = process.poll() == -signal.SIGKILL  # by its test
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        assert killed or process.wait(STOP_S) == 0, log.read_text()[-3000:]
        assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
    finally:
        process.kill()
        process.wait(STOP_S)
