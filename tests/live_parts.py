"""Real parts of a deployment, for tests of what controls engines: Prometheus and the daemon.

All parts can be had from here: the engine that needs no vLLM is `stand_in`'s, the links that fail
on demand are `faulty_links`'. Nothing here misbehaves by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from tests.faulty_links import Behaviour, Proxy, SocketProxy
from tests.stand_in import StandIn, traffic
from tests.vllm_server import write_plan
from tests.waiting import free_port, poll

__all__ = [
    "Behaviour",
    "DaemonProcess",
    "Prometheus",
    "Proxy",
    "SocketProxy",
    "StandIn",
    "daemon",
    "free_port",
    "poll",
    "prometheus",
    "traffic",
    "write_plan",
]
TRIMTAB: Final = (sys.executable, "-m", "trimtab.controller.cli.app")
"""The command line, as words."""
_START_S: Final = 60.0
_STOP_S: Final = 20.0


@dataclass
class Prometheus:
    """A real Prometheus; `kill` and `start` keep its port and what it has stored."""

    url: str
    folder: Path
    process: subprocess.Popen[bytes]
    command: tuple[str, ...]

    def start(self) -> None:
        """Start it again after `kill`."""
        with (self.folder / "prometheus.log").open("ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, cwd=self.folder)
        poll(self.ready, what=f"Prometheus' start, {self.folder}", deadline_s=_START_S)

    def kill(self) -> None:
        """End it as the kernel does."""
        self.process.kill()
        self.process.wait(_STOP_S)

    def pause(self) -> None:
        """Stop it where it is: connections are accepted, nothing answers."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `pause`."""
        self.process.send_signal(signal.SIGCONT)

    def ready(self) -> bool:
        """Whether it answers queries."""
        assert self.process.poll() is None, (self.folder / "prometheus.log").read_text()[-2000:]
        return _status(f"{self.url}/-/ready") == 200

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The vector that an expression gives now."""
        with urllib.request.urlopen(
            f"{self.url}/api/v1/query?query={urllib.parse.quote(expression)}", timeout=5
        ) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found


@contextmanager
def prometheus(
    folder: Path,
    targets: Sequence[str],
    scrape_interval: str = "500ms",
    *,
    rules: Sequence[Path] = (),
    job: str = "vllm",
) -> Iterator[Prometheus]:
    """The real Prometheus on a free port, once it has scraped each target.

    Args:
        folder: For its configuration, log and data.
        targets: `host:port` of pages of metrics.
        scrape_interval: As Prometheus writes it.
        rules: Files of rules.
        job: Label `job` of all targets.
    """
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Prometheus is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "global": {"scrape_interval": scrape_interval, "evaluation_interval": scrape_interval},
        "rule_files": [str(path.resolve()) for path in rules],
        "scrape_configs": [
            {
                "job_name": job,
                "scrape_timeout": scrape_interval,
                "static_configs": [{"targets": list(targets)}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = (
        *(program, f"--config.file={folder / 'prometheus.yml'}"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
        *("--log.level=warn", "--storage.tsdb.retention.time=2h"),
    )
    log = (folder / "prometheus.log").open("ab")
    with log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    started = Prometheus(f"http://127.0.0.1:{port}", folder, process, command)
    try:
        poll(started.ready, what=f"Prometheus' start, {folder}", deadline_s=_START_S)
        # It learns its targets some seconds after it has said that it is ready.
        poll(lambda: len(started.query("up")) == len(targets), what="the first scrapes")
        yield started
    finally:
        started.process.kill()
        started.process.wait(_STOP_S)


@dataclass
class DaemonProcess:
    """A `trimtab run` process."""

    url: str
    token: str
    folder: Path
    process: subprocess.Popen[bytes]
    engines: tuple[str, ...]
    start_s: float
    """From its start until it answered, seconds."""

    @property
    def log(self) -> str:
        """What it has written."""
        return (self.folder / "daemon.log").read_text(errors="replace")

    def state(self, engine: str | None = None, *, decisions: bool = False) -> dict[str, Any]:
        """All that `/api/state` says of one engine; without a name, of the first.

        Args:
            engine: Its name.
            decisions: With the last half hour's decisions.
        """
        query = {"engine": engine or self.engines[0], "since": 0 if decisions else 10**12}
        url = f"{self.url}/api/state?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)["detail"]
        return found

    def metrics(self) -> str:
        """Its own page of metrics."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    def wait_for(
        self,
        found: Callable[[dict[str, Any]], bool],
        *,
        what: str,
        engine: str | None = None,
        deadline_s: float = 30.0,
    ) -> float:
        """Wait until an engine's state is so; how long it took, seconds."""

        def so() -> bool:
            assert self.process.poll() is None, f"the daemon ended:\n{self.log[-3000:]}"
            try:
                return found(self.state(engine))
            except (OSError, KeyError):
                return False

        return poll(so, what=what, deadline_s=deadline_s)

    def post(self, path: str, body: Mapping[str, object] | None = None) -> int:
        """Send an operator's command; the HTTP status."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body or {}).encode(),
            {"authorization": f"Bearer {self.token}", "content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


@contextmanager
def daemon(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    program: Sequence[str] = TRIMTAB,
    env: Mapping[str, str] | None = None,
    ready: bool = True,
) -> Iterator[DaemonProcess]:
    """The real daemon as a process of its own; SIGTERM ends it.

    Args:
        folder: For its settings file, state and log.
        settings: As in the settings file; `listen` and `state_dir` are chosen where not given.
        program: The words before `run`.
        env: Additions to its environment.
        ready: Whether to wait until it answers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port, token = free_port(), "a-token-for-tests-0123456789"
    whole: dict[str, Any] = {
        "listen": f"127.0.0.1:{port}",
        "state_dir": str(folder / "state"),
        **settings,
    }
    (folder / "daemon.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    start_s = time.monotonic()
    with (folder / "daemon.log").open("ab") as log:
        process = subprocess.Popen(
            [*program, "run", "--config", str(folder / "daemon.yaml")],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=os.environ | {"TRIMTAB_DAEMON_TOKEN": token} | dict(env or {}),
        )
    names = tuple(whole["engines"])
    started = DaemonProcess(f"http://{whole['listen']}", token, folder, process, names, 0.0)
    try:
        if ready:

            def answers() -> bool:
                assert process.poll() is None, f"the daemon ended:\n{started.log[-3000:]}"
                return _status(f"{started.url}/healthz") is not None

            poll(answers, what="the daemon's start", deadline_s=_START_S, every_s=0.02)
            started = replace(started, start_s=time.monotonic() - start_s)
        yield started
    finally:
        # Whatever a test did to it: one that was stopped would wait for ever.
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_STOP_S)


def _status(url: str) -> int | None:
    """The HTTP status that a URL answers with; None: no answer."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None
