"""Has the traffic profiled when a tier becomes slow: what to do, when, and never in a tick's way.

`see` is called once a tick and only decides; flushing the engine's log and `trimtab profile` happen
in a thread and in a process of low priority that is killed at its time-out. What a profile says is
`trimtab.training.profile`'s business.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from trimtab.controller.daemon.slowdown import Slowdown, SlowdownDetector
from trimtab.engine_bridge.errors import TrimtabError
from trimtab.engine_bridge.plan import Plan
from trimtab.engine_bridge.telemetry import Telemetry
from trimtab.engine_bridge.vllm.control_client import ControlClient

LEAD_S: Final = 30.0
"""The profile begins so long before the tier was seen to be slow: causes come before effects."""
TIME_OUT_S: Final = 120.0
"""Longest run of `trimtab profile`, seconds."""
MOST_PROFILES: Final = 32
"""Profiles that are kept for an engine; the oldest go first."""
ALERT_FILE: Final = "alert.json"
"""What was seen, beside the profile."""
_NICE: Final = 19
_SECRET: Final = re.compile(r"TRIMTAB_\w*(TOKEN|KEY|SECRET)")
"""Names of environment variables with what the profile has no use for."""
_FLUSH_WAIT_S: Final = 10.0
_FLUSH_PAUSE_S: Final = 0.25
_LOG: Final = logging.getLogger("trimtab.profile")

Flush = Callable[[], None]
"""Has the engine write its traffic log out and returns when it is done, or after a bounded wait."""


class ProfileSettings(Protocol):
    """What the daemon's settings say of profiles (its section `profile`)."""

    @property
    def baseline_factor(self) -> float:
        """How many times its baseline a tier's P99 TTFT must be."""

    @property
    def for_s(self) -> float:
        """For how long, seconds."""

    @property
    def sample_s(self) -> float:
        """How long traffic is collected after that, seconds."""

    @property
    def at_most_every_s(self) -> float:
        """Least time between two profiles of an engine, seconds."""


class ProfileWatch:
    """Watches one engine; `see`, `profile` and `close` belong to its loop's thread."""

    def __init__(
        self,
        plan: Plan,
        settings: ProfileSettings,
        *,
        engine: str,
        traffic_log: Path,
        out: Path,
        flush: Flush,
        monotonic_s: Callable[[], float] = time.monotonic,
        start: Callable[[Callable[[], None]], None] | None = None,
        time_out_s: float = TIME_OUT_S,
    ) -> None:
        """Start watching.

        Args:
            plan: Names of the tiers.
            settings: When to profile, and for how long.
            engine: Its name; profiles go to folders that begin with it.
            traffic_log: Folder of the engine's traffic log, as this process reads it.
            out: Folder of all engines' profiles; made when the first one is.
            flush: Has the engine write its log out (`flush_traffic_log`).
            monotonic_s: Seconds that never go back.
            start: Runs the work beside the caller; None: a thread.
            time_out_s: Longest run of `trimtab profile`, seconds.
        """
        self._plan, self._settings, self._engine = plan, settings, engine
        self._log, self._out, self._flush = traffic_log, out, flush
        self._monotonic_s, self._time_out_s = monotonic_s, time_out_s
        self._start = start or _start_thread
        self._detector = SlowdownDetector(
            plan.tier_names, factor=settings.baseline_factor, for_s=settings.for_s
        )
        self._slowdown: Slowdown | None = None
        self._since_unix_s = 0.0
        self._found_s = self._next_s = -1e18
        self._job: _Job | None = None
        self._profile = self._detail = ""

    @property
    def profile(self) -> str:
        """Path of the last profile's page; empty without one."""
        self._collect()
        return self._profile

    @property
    def detail(self) -> str:
        """Why the last profile failed; empty if it did not."""
        self._collect()
        return self._detail

    @property
    def busy(self) -> bool:
        """Whether traffic is being collected or a profile is being made."""
        self._collect()
        return self._slowdown is not None or self._job is not None

    def see(self, telemetry: Telemetry | None, unix_s: float) -> None:
        """Take a tick's telemetry in; takes microseconds and never raises.

        Args:
            telemetry: The newest interval; an old one again is passed over.
            unix_s: Seconds since 1970.
        """
        if telemetry is None:
            return
        now_s = self._monotonic_s()
        found = self._detector.see(telemetry, now_s)
        self._collect()
        if self._slowdown is not None:
            if now_s - self._found_s >= self._settings.sample_s:
                self._begin(telemetry, now_s)
        elif found is not None and self._job is None and now_s >= self._next_s:
            self._slowdown = found
            self._since_unix_s = unix_s - found.for_s - LEAD_S
            self._found_s = now_s
            self._next_s = now_s + self._settings.at_most_every_s
            _LOG.warning(
                "%s: P99 TTFT of %s is %.0f ms, %.1f times its %.0f ms of the last hour, for %.0f"
                " s; its traffic will be profiled in %.0f s",
                self._engine, found.tier, found.p99_ms, found.p99_ms / found.baseline_ms,
                found.baseline_ms, found.for_s, self._settings.sample_s,
            )  # fmt: skip

    def close(self) -> None:
        """End what is under way; a profile that is being made is given up."""
        self._slowdown = None
        if self._job is not None:
            self._job.kill()

    def _begin(self, telemetry: Telemetry, now_s: float) -> None:
        """The traffic is collected: have the profile made."""
        assert self._slowdown is not None
        slowdown, self._slowdown = self._slowdown, None
        # By the clock that never goes back: the engine's log does not follow a jump of the other.
        seconds = LEAD_S + slowdown.for_s + now_s - self._found_s
        ends = time.gmtime(self._since_unix_s + seconds)
        facts = {
            "engine": self._engine,
            "tier": slowdown.tier,
            "p99_ttft_ms": slowdown.p99_ms,
            "baseline_ms": slowdown.baseline_ms,
            "for_s": slowdown.for_s,
            "found_unix_s": self._since_unix_s + LEAD_S + slowdown.for_s,
            # Requests that have not ended are in no log yet.
            "waiting": _by_tier(self._plan, [tier.queue_length for tier in telemetry.tiers]),
            "running": _by_tier(self._plan, [tier.running for tier in telemetry.tiers]),
        }
        self._job = _Job(
            self._log,
            self._out / f"{self._engine}-{time.strftime('%Y%m%dT%H%M%SZ', ends)}",
            since_unix_s=self._since_unix_s,
            seconds=seconds,
            facts=facts,
            flush=self._flush,
            tidy=lambda: _prune(self._out, self._engine),
            time_out_s=self._time_out_s,
        )
        self._start(self._job.run)

    def _collect(self) -> None:
        """Take over what a job that is over has left."""
        job = self._job
        if job is not None and job.over:
            self._job, self._detail = None, job.failure
            self._profile = job.page or self._profile


class _Job:
    """One profile in the making; `run` is called once, beside the loop."""

    def __init__(
        self,
        log: Path,
        folder: Path,
        *,
        since_unix_s: float,
        seconds: float,
        facts: dict[str, object],
        flush: Flush,
        tidy: Callable[[], None],
        time_out_s: float,
    ) -> None:
        self._folder, self._facts, self._flush, self._tidy = folder, facts, flush, tidy
        self._time_out_s = time_out_s
        self._command = [
            sys.executable, "-m", "trimtab.controller.cli.app", "profile",
            "--traffic-log", str(log), "--since", f"{since_unix_s:.3f}",
            "--seconds", f"{seconds:.3f}", "--out", str(folder),
            "--alert", str(folder / ALERT_FILE),
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self.over = False
        """Whether it has ended; what follows is final then."""
        self.failure = ""
        self.page = ""

    def run(self) -> None:
        """Flush, profile, and leave the result in `page` or `failure`."""
        try:
            try:
                self._flush()
            except (TrimtabError, KeyError, TypeError) as error:
                # No answer, or one of another program. What is in files already may be enough; the
                # profile says how far it reaches.
                _LOG.warning("the traffic log could not be flushed: %s", error)
            self._make()
            self._tidy()
        except (OSError, subprocess.SubprocessError) as error:
            self.failure = f"profile: {error}"
        finally:
            if self.failure:
                _LOG.warning("%s", self.failure)
            self.over = True

    def kill(self) -> None:
        """End the process and all that it started."""
        with self._lock:
            self._given_up = True
            if self._process is not None and self._process.poll() is None:
                # It may end, and be waited for by its thread, in between.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)

    def _make(self) -> None:
        self._folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.mkdir(mode=0o700)
        text = json.dumps(self._facts, indent=2) + "\n"
        (self._folder / ALERT_FILE).write_text(text, encoding="utf-8")
        with self._lock:
            if self._given_up:
                return
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=_without_secrets(os.environ),
                start_new_session=True,
            )
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICE)
        try:
            _, errors = self._process.communicate(timeout=self._time_out_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.communicate()
            self.failure = f"profile: took longer than {self._time_out_s:g} s and was ended"
            return
        if self._process.returncode == 0:
            self.page = str(self._folder / "profile.html")
        elif not self._given_up:
            last = (errors.strip().splitlines() or ["no word"])[-1]
            self.failure = f"profile: exit code {self._process.returncode}: {last[:300]}"


def _without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of who needs no token: what it does not have it cannot leave behind."""
    return {name: value for name, value in environment.items() if not _SECRET.fullmatch(name)}


def flush_traffic_log(
    address: str | Path,
    *,
    token: str | None = None,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Have an engine write its traffic log out, and wait until its writer has done so.

    Args:
        address: Its control socket, as `ControlClient` takes it.
        token: For TCP; None: the value of TRIMTAB_CONTROL_TOKEN.
        wait: Sleeps so many seconds.

    Raises:
        ControlUnavailableError: no answer.
        ControlRefusedError: the engine keeps no traffic log.
    """
    with ControlClient(address, token=token) as client:
        answer = client.flush()
        wanted = answer["handed_over_rows"]
        for _ in range(int(_FLUSH_WAIT_S / _FLUSH_PAUSE_S)):
            if answer["written_rows"] + answer["dropped_rows"] >= wanted:
                return
            wait(_FLUSH_PAUSE_S)
            answer = client.flush()


def _by_tier(plan: Plan, values: Sequence[int]) -> dict[str, int]:
    return dict(zip(plan.tier_names, values, strict=True))


def _prune(out: Path, engine: str) -> None:
    """Delete the oldest of an engine's profiles."""
    found = sorted(out.glob(f"{glob.escape(engine)}-????????T??????Z"))
    for folder in found[: max(0, len(found) - MOST_PROFILES)]:
        shutil.rmtree(folder, ignore_errors=True)


def _start_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="trimtab-profile", daemon=True).start()
