"""The deployment that faults are tried on, and a trial of one fault.

Real parts: the emulated vLLM server with load, Prometheus, the daemon. Links that can fail stand
between the daemon and the other two. What is judged in every trial is here; the faults are the
tests' business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.chaos.steady_load import SteadyLoad
from tests.chaos.watcher import Watcher
from tests.faulty_links import Proxy, SocketProxy
from tests.live_parts import TRIMTAB, DaemonProcess, Prometheus, daemon
from tests.vllm_server import Server
from tests.waiting import poll
from trimtab.engine_bridge.plan import Plan

GUARD: Final = {
    "probation_s": 1.0,
    "ramp_s": 1.0,
    "cool_down_s": 1.0,
    "trip_memory_s": 1.0,
    # The machine is slower than any promise, and no policy was trained for it.
    "loss_allowance_s": 1e9,
    "fair_reference": 0.0,
    "novel_fraction": 1.0,
}
"""The guard's times are tens of times shorter than usual; promises and envelope never trip."""
SLACK_S: Final = 1.0
"""What a busy machine may add to a bound."""


@dataclass
class Recovery:
    """What one trial came to; times in seconds."""

    fault: str
    lasted_s: float
    """How long the fault lasted."""
    static_after_s: float | None
    """From its beginning until the static plan held; None: the policy acted on."""
    recovered_s: float
    """From its end until the daemon controlled the engine by fresh figures."""
    acting_s: float
    """From its end until the policy acted again; probation and ramp are in it."""
    contact: str
    """What the daemon said of its contact during the fault."""
    shown: str
    """What it showed the operator."""
    requests: int
    """Requests that were sent meanwhile; all of them ended whole."""


@dataclass
class Rig:
    """All parts of the deployment."""

    server: Server
    plan: Plan
    prometheus: Prometheus
    prometheus_link: Proxy
    control_link: SocketProxy
    bundle: Path
    folder: Path
    watcher: Watcher
    load: SteadyLoad
    recoveries: list[Recovery]
    daemon: DaemonProcess | None = None
    started: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def interval_s(self) -> float:
        """The control interval."""
        return float(self.plan.controller.interval_s)

    @property
    def lease_s(self) -> float:
        """How long an allocation holds when nobody renews it."""
        return float(self.plan.controller.lease_s)

    def settings(self, **other: Any) -> dict[str, Any]:
        """The daemon's settings."""
        target = self.server.url.removeprefix("http://")
        return {
            "mode": "active",
            "policy": f"bundle:{self.bundle}",
            "guard": GUARD,
            "prometheus": {"url": self.prometheus_link.url, "match": {"instance": target}},
            "engines": {
                "a": {
                    "plan": str(self.server.folder / "plan.yaml"),
                    "control": str(self.control_link.path),
                }
            },
            **other,
        }

    def start_daemon(
        self,
        *,
        program: Sequence[str] = TRIMTAB,
        env: Mapping[str, str] | None = None,
        **other: Any,
    ) -> DaemonProcess:
        """Begin with another daemon in the place of the one before."""
        self.end_daemon()
        self.started += 1
        folder = self.folder / f"daemon-{self.started}"
        context = daemon(folder, self.settings(**other), program=program, env=env)
        self.daemon = self._stack.enter_context(context)
        return self.daemon

    def end_daemon(self) -> None:
        """End the daemon, if there is one."""
        self._stack.close()
        self.daemon = None

    def usual_daemon(self) -> DaemonProcess:
        """The daemon that trials without wishes of their own share."""
        if self.daemon is None or self.daemon.process.poll() is not None:
            self.start_daemon()
        assert self.daemon is not None
        return self.daemon

    def acts(self) -> bool:
        """Whether a policy's allocation holds in the engine."""
        return self.watcher.now.leased and not self.watcher.now.static

    def is_static(self) -> bool:
        """Whether the static plan holds in the engine."""
        return self.watcher.now.static

    def controls(self) -> bool:
        """Whether the daemon holds the lease and its figures are fresh."""
        assert self.daemon is not None
        try:
            state = self.daemon.state()
        except OSError:
            return False
        return bool(state["contact"] == "controlling" and state["holder"])


class Trial:
    """One fault, from before it begins until all is well again."""

    def __init__(self, rig: Rig, fault: str) -> None:
        """Wait until a policy acts, then begin."""
        self.rig, self.fault = rig, fault
        poll(rig.acts, what=f"{fault}: a policy that acts before it", deadline_s=60)
        self.contact = self.shown = ""
        self.static_after_s: float | None = None
        self._sent = rig.load.check()
        self._begun_s = self._healed_s = time.monotonic()

    def begins(self) -> None:
        """The fault itself begins only now."""
        self._begun_s = time.monotonic()

    def falls_back(self, within_s: float) -> None:
        """Wait until the static plan holds in the engine."""
        poll(self.rig.is_static, what=f"{self.fault}: static plan", deadline_s=within_s)
        at_s = next(look.at_s for look in self.rig.watcher.since(self._begun_s) if look.static)
        self.static_after_s = at_s - self._begun_s

    def acts_on(self, for_s: float) -> None:
        """The policy's allocation holds all the time."""
        from_s = time.monotonic()
        time.sleep(for_s)
        looks = self.rig.watcher.since(from_s)
        assert looks
        assert not any(look.static for look in looks), f"{self.fault}: it fell back"

    def stays_static(self, for_s: float) -> None:
        """The static plan holds all the time."""
        from_s = time.monotonic()
        time.sleep(for_s)
        assert all(look.static for look in self.rig.watcher.since(from_s))

    def look(self, found: Callable[[dict[str, Any]], bool] = lambda state: True) -> dict[str, Any]:
        """What the operator sees now; waits until it is as told."""
        assert self.rig.daemon is not None
        process = self.rig.daemon
        process.wait_for(found, what=f"{self.fault}: what the operator sees")
        state = process.state()
        self.contact = state["contact"]
        self.shown = state["bundle_error"] or state["detail"] or state["headline"]
        return state

    def healed(self) -> None:
        """The fault is over."""
        self._healed_s = time.monotonic()

    def end(self) -> None:
        """Wait for the recovery, and judge."""
        rig = self.rig
        poll(rig.controls, what=f"{self.fault}: recovery", deadline_s=60)
        recovered_s = time.monotonic() - self._healed_s
        poll(rig.acts, what=f"{self.fault}: a policy that acts again", deadline_s=60)
        acting_s = time.monotonic() - self._healed_s
        assert not rig.watcher.unlawful(self._begun_s)
        requests = rig.load.check() - self._sent
        assert requests > 0
        rig.recoveries.append(
            Recovery(
                fault=self.fault,
                lasted_s=self._healed_s - self._begun_s,
                static_after_s=self.static_after_s,
                recovered_s=recovered_s,
                acting_s=acting_s,
                contact=self.contact,
                shown=self.shown,
                requests=requests,
            )
        )


@contextmanager
def trial(rig: Rig, fault: str) -> Iterator[Trial]:
    """A trial of a fault: the block brings it about, waits for what follows, and ends it."""
    started = Trial(rig, fault)
    yield started
    started.end()
